"""solve.py: any usual notation in, the grid, its loops and a verdict out, the exit code to match."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from data.build import load_csv_puzzles
from data.sudoku import BLANK_TOKEN, Box, digits_from_tokens, format_grid, parse_puzzle
from tests.runs import BOX4, BOX9, Scripted, bundled, evaluating, finished_run, puzzles, solving
from trainer import solver
from trainer.errors import UserError
from trainer.evaluator import evaluate, resolve_depth
from trainer.report import evaluate_program, ready_model
from trainer.runtime import set_up
from trainer.solver import solve_program, split_puzzles, verdict

FIVE = puzzles(BOX4, 5)
RIGHT = digits_from_tokens(FIVE.labels)
ASKED = digits_from_tokens(FIVE.inputs)


def line(grid: np.ndarray, blank: str = ".") -> str:
    return "".join((blank + "123456789")[d] for d in grid)


class BySight(Scripted):
    """Knows which puzzle it sees by its tokens, since solve.py has no ids."""

    def encode(self, tokens: Tensor, puzzle_rows: Tensor) -> Tensor:
        known = [row.tobytes() for row in FIVE.inputs]
        return super().encode(tokens, puzzle_rows.new_tensor([known.index(row.numpy().tobytes()) for row in tokens]))


def script(monkeypatch: pytest.MonkeyPatch, answers: np.ndarray, halts: np.ndarray | None = None) -> None:
    """Let solve.py use a model that answers these tokens [5, 3 segments, S]; the tiny run's H=2 makes it 6 updates."""
    model = BySight(np.repeat(answers, 2, axis=1), halts, H_cycles=2)
    monkeypatch.setattr(solver, "ready_model", lambda *_: model)


def always(answers: np.ndarray) -> np.ndarray:
    return np.repeat(answers[:, None], 3, axis=1)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_right_answer_is_printed_and_exits_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    halts = np.full((5, 3), -1.0)
    halts[0, 1] = 1
    script(monkeypatch, always(FIVE.labels), halts)
    assert solve_program(solving(finished_run(), puzzle=line(ASKED[0]))) == 0
    out = capsys.readouterr().out
    assert format_grid(RIGHT[0], BOX4) in out and f"\n{line(RIGHT[0])}\n" in out
    assert "loops: 2 of at most 3 segments (24 executed layers)" in out
    assert "valid: complete, keeps the givens, breaks no rule" in out
    assert solve_program(solving(finished_run(), "halting=off", puzzle=line(ASKED[0]))) == 0
    assert "loops: 3 of at most 3 segments (36 executed layers)" in capsys.readouterr().out


def test_a_wrong_answer_says_why_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = FIVE.labels.copy()
    given = int(np.argmax(ASKED[0] != 0))
    wrong[0, given] = wrong[0, given] % 4 + 2
    script(monkeypatch, always(wrong))
    assert solve_program(solving(finished_run(), puzzle=line(ASKED[0]))) == 1
    out = capsys.readouterr().out
    assert f"NOT valid: changes a given at row {given // 4 + 1} column {given % 4 + 1}; violates a rule: row" in out
    assert " valid: " not in out.replace("NOT valid", "")


def test_an_answer_may_hold_padding_or_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Early checkpoints predict tokens that are no digits; they are shown as blanks and judged as such."""
    holes = FIVE.labels.copy()
    blanks = np.flatnonzero(ASKED[0] == 0)[:2]
    holes[0, blanks] = (0, BLANK_TOKEN)
    script(monkeypatch, always(holes))
    assert solve_program(solving(finished_run(), puzzle=line(ASKED[0]))) == 1
    out = capsys.readouterr().out
    shown = RIGHT[0].copy()
    shown[blanks] = 0
    assert f"\n{line(shown)}\n" in out and "NOT valid: violates a rule: 2 cells are empty" in out


def test_a_file_of_puzzles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One puzzle a line and grids of several lines, answers in the file's order; one wrong answer makes it exit 1."""
    file = tmp_path / "puzzles.txt"
    grids = "\n\n".join(format_grid(ASKED[i], BOX4) for i in (2, 3))
    file.write_text(f"# mine\n{line(ASKED[0])}\n{line(ASKED[1], '0')}\n\n{grids}\n")
    script(monkeypatch, always(FIVE.labels))
    assert solve_program(solving(finished_run(), file=str(file))) == 0
    out = capsys.readouterr().out
    answers = [text for text in out.splitlines() if re.fullmatch(r"[1-4]{16}", text)]
    assert answers == [line(grid) for grid in RIGHT[:4]] and out.endswith("4 of 4 answers are valid\n")

    wrong = FIVE.labels.copy()
    wrong[1] = wrong[0]
    script(monkeypatch, always(wrong))
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff" + file.read_text()))
    assert solve_program(solving(finished_run(), file="-")) == 1
    assert capsys.readouterr().out.endswith("3 of 4 answers are valid\n")


def test_answers_are_those_of_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled checkpoint: solve.py's grids and loops are evaluate's with eval.halting=on, each puzzle by itself."""
    found, box, some = bundled(), Box(2, 3), tmp_path / "some.csv"
    some.write_text("".join(found.puzzles.read_text().splitlines(keepends=True)[:13]))
    split = load_csv_puzzles(some, box)
    asked = evaluating(found.checkpoint, "eval.halting=on", puzzles=some, out=tmp_path / "out")
    results = evaluate_program(asked)
    checkpoint = solver.load_checkpoint(found.checkpoint)
    model = ready_model(checkpoint, "ema", set_up(asked.trainer))
    depth = resolve_depth(asked.eval, checkpoint.config.schedule, checkpoint.config.model)
    whole = evaluate(model, split, box, depth, halting="on")
    assert whole.last.exact == results["exact"] > 0 and results["n"] == 12
    for i in (0, 3, 7):
        code = solve_program(solving(found.checkpoint, puzzle=line(digits_from_tokens(split.inputs[i]))))
        out = capsys.readouterr().out
        assert f"\n{line(digits_from_tokens(whole.answers[i]))}\n" in out
        assert f"loops: {whole.segments[i]} of at most" in out and code == (not whole.exact[i])


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("puzzle", "message"),
    [
        ("1" + "." * 14, "puzzle: 15 cells found, 16 expected for 4x4"),
        ("1" + "." * 16, "puzzle: 17 cells found, 16 expected for 4x4"),
        ("1x" + "." * 14, "puzzle: unexpected character 'x' at position 2"),
        ("5" + "." * 15, "puzzle: digit '5' at position 1 is too large for 4x4"),
        ("1..1" + "." * 12, "puzzle: digit 1 stands twice in row 1: at row 1 column 1 and at row 1 column 4"),
        ("2...2..........." + "", "puzzle: digit 2 stands twice in column 1"),
        ("3....3..........", "puzzle: digit 3 stands twice in box 1"),
        (line(RIGHT[0]), "nothing to solve: no cell is empty"),
    ],
)
def test_mistakes_in_a_puzzle_are_named(puzzle: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        solve_program(solving(finished_run(), puzzle=puzzle))
    assert "\n" not in str(caught.value)


def test_mistakes_in_a_file_name_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "puzzles.txt"
    for text, message in (
        (f"{line(ASKED[0])}\n\n# short\n{line(ASKED[1])[:-1]}\n", "line 4: puzzle: 15 cells found"),
        ("1...\n....\n....\n...x\n", "line 1: puzzle: unexpected character 'x' at line 4, column 4"),
        ("", "holds no puzzle"),
        ("# nothing\n\n", "holds no puzzle"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=f"{file}.*{re.escape(message)}"):
            solve_program(solving(finished_run(), file=str(file)))
    with pytest.raises(UserError, match=r"file=.*nowhere\.txt: cannot be read"):
        solve_program(solving(finished_run(), file=f"{tmp_path}/nowhere.txt"))
    file.write_bytes(b"\xff\xfe1...")
    with pytest.raises(UserError, match="cannot be read"):
        solve_program(solving(finished_run(), file=str(file)))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="file=-: standard input is closed"):
        solve_program(solving(finished_run(), file="-"))
    with pytest.raises(UserError, match="nothing to solve: give puzzle=<cells>, file=<path> or file=-"):
        solve_program(solving(finished_run()))


# --- notations -------------------------------------------------------------------------------------------------------

CLASSIC = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"


def rows(text: str) -> list[str]:
    return [text[i : i + 9] for i in range(0, 81, 9)]


@pytest.mark.parametrize(
    "text",
    [
        CLASSIC,
        CLASSIC.replace(".", "0"),
        CLASSIC.replace(".", "_"),
        CLASSIC.replace(".", "-"),
        "\n".join(rows(CLASSIC)),
        "\n".join(" ".join(row) for row in rows(CLASSIC)),
        "\n".join(" ".join(row).replace(".", "-") for row in rows(CLASSIC)),
        format_grid(parse_puzzle(CLASSIC, BOX9), BOX9),
        "+-------+-------+-------+\n"
        + "\n".join(f"| {' '.join(row[:3])} | {' '.join(row[3:6])} | {' '.join(row[6:])} |" for row in rows(CLASSIC))
        + "\n+-------+-------+-------+",
        "┌───────┬───────┬───────┐\n"
        + "\n".join(f"│ {' '.join(row[:3])} │ {' '.join(row[3:6])} │ {' '.join(row[6:])} │" for row in rows(CLASSIC))
        + "\n└───────┴───────┴───────┘",
    ],
    ids=["dots", "zeros", "underscores", "dashes", "rows", "spaced", "spaced dashes", "ours", "framed", "drawn"],
)
def test_usual_notations_are_one_puzzle(text: str) -> None:
    """By itself, and twice in a file with a blank line between."""
    expected = parse_puzzle(CLASSIC, BOX9)
    for content, count in ((text, 1), (f"{text}\n\n{text}\n", 2)):
        found = split_puzzles(content, BOX9)
        assert len(found) == count
        assert all(np.array_equal(parse_puzzle(puzzle, BOX9), expected) for _, puzzle in found)


def test_grids_may_follow_without_a_blank_line() -> None:
    both = "\n".join(rows(CLASSIC) + rows(CLASSIC.replace(".", "0")) + [CLASSIC])
    assert [begin for begin, _ in split_puzzles(both, BOX9)] == [1, 10, 19]
    assert [begin for begin, _ in split_puzzles(both.replace(".", "-"), BOX9)] == [1, 10, 19]


def test_verdict() -> None:
    right = RIGHT[0]
    assert verdict(right, ASKED[0], BOX4) == []
    swapped = right[[1, 0, *range(2, 16)]]
    assert all(line.startswith("violates a rule: column") for line in verdict(swapped, np.zeros(16, np.uint8), BOX4))
    assert verdict(right, right % 4 + 1, BOX4)[0] == "changes a given at row 1 column 1"
