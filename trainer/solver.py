"""What solve.py does: read puzzles in the usual notations, run the model, judge the answers."""

import sys
from pathlib import Path

import numpy as np

from data.arrays import Split
from data.sudoku import (
    BLANK_TOKEN,
    BLANKS,
    SYMBOLS,
    Box,
    check_givens,
    digits_from_tokens,
    format_grid,
    parse_puzzle,
    rule_violations,
    tokens_from_digits,
)
from trainer.checkpoint import find_checkpoint, load_checkpoint
from trainer.config import EvalConfig, SolveConfig
from trainer.errors import UserError
from trainer.evaluator import evaluate, resolve_depth
from trainer.report import ready_model
from trainer.runtime import set_up

_CELLS = frozenset(SYMBOLS + SYMBOLS.lower() + BLANKS)


def split_puzzles(text: str, box: Box) -> list[tuple[int, str]]:
    """(first line, text) of each puzzle in a file: one a line, or grids of several lines; `#` starts a comment line.

    A line with more cells than a row is a puzzle by itself; shorter lines are rows and are collected until the grid is
    full. Blank lines part grids.
    """
    puzzles: list[tuple[int, str]] = []
    rows: list[str] = []
    begin = 0

    def cells_of(line: str) -> int:
        bare = [char for char in line if not char.isspace() and char not in "|"]
        if len(bare) == box.digits and all(char in _CELLS or char == "-" for char in bare):
            return box.digits  # a row whose blanks are dashes, not a border
        return sum(char in _CELLS for char in bare)

    def cells(lines: list[str]) -> int:
        return sum(map(cells_of, lines))

    def close() -> None:
        if cells(rows):
            puzzles.append((begin, "\n".join(rows)))
        rows.clear()

    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if bare.startswith("#"):
            continue
        if not bare:
            close()
            continue
        if cells([bare]) > box.digits or (len(bare) == box.cells and "-" in bare):
            close()
            puzzles.append((number, bare))
            continue
        if not rows:
            begin = number
        rows.append(bare)
        if cells(rows) >= box.cells:
            close()
    close()
    return puzzles


def read_puzzles(config: SolveConfig, box: Box) -> np.ndarray:
    """Digits uint8 [N, S] of the puzzles asked for; the first mistake is named with its place."""
    if config.puzzle is not None:
        named = [("", config.puzzle)]
    elif config.file is not None:
        try:
            if config.file == "-" and sys.stdin is None:
                raise UserError("file=-: standard input is closed; pipe puzzles in, or give file=<path>")
            text = sys.stdin.read() if config.file == "-" else Path(config.file).read_text(encoding="utf-8")
            text = text.removeprefix("\ufeff")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"file={config.file}: cannot be read ({error}); give a text file of puzzles") from error
        where = "standard input" if config.file == "-" else config.file
        named = [(f"{where}, line {line}: ", puzzle) for line, puzzle in split_puzzles(text, box)]
        if not named:
            raise UserError(f"file={config.file}: holds no puzzle; give {box.cells} cells a puzzle, 0 or . for a blank")
    else:
        raise UserError("nothing to solve: give puzzle=<cells>, file=<path> or file=- for standard input")
    grids = []
    for place, text in named:
        try:
            grid = parse_puzzle(text, box)
            check_givens(grid, box)
        except UserError as error:
            raise UserError(f"{place}{error}") from error
        grids.append(grid)
    return np.stack(grids)


def verdict(answer: np.ndarray, puzzle: np.ndarray, box: Box) -> list[str]:
    """What is wrong with an answer, digits [S]; empty when it is a solution of the puzzle."""
    changed = np.flatnonzero((puzzle != 0) & (puzzle != answer))
    n = box.digits
    problems = [f"changes a given at row {c // n + 1} column {c % n + 1}" for c in changed[:3]]
    return problems + [f"violates a rule: {line}" for line in rule_violations(answer, box)]


def solve_program(config: SolveConfig) -> int:
    """Print each answer with its loops and verdict; 0 when all are valid, else 1."""
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint, config.which))
    box = checkpoint.box
    puzzles = read_puzzles(config, box)
    if (puzzles != 0).all():
        raise UserError("nothing to solve: no cell is empty; give 0 or . for the cells to fill in")
    # A few puzzles are done long before anything is compiled.
    settings = (
        config.trainer if config.trainer.compile is True else config.trainer.model_copy(update={"compile": False})
    )
    runtime = set_up(settings)
    model = ready_model(checkpoint, config.weights, runtime)
    asked = EvalConfig(segments=config.segments, H_cycles=config.H_cycles, L_cycles=config.L_cycles)
    depth = resolve_depth(asked, checkpoint.config.schedule, checkpoint.config.model)
    tokens = tokens_from_digits(puzzles)
    nothing = np.zeros(len(puzzles), np.int32)
    result = evaluate(
        model,
        Split(tokens, np.zeros_like(tokens), nothing, nothing),
        box,
        depth,
        halting=config.halting,
        batch_size=64,
    )
    # An answer may hold padding, token 0; it is shown and judged as a blank.
    answers, valid = digits_from_tokens(np.maximum(result.answers, BLANK_TOKEN)), 0
    for puzzle, answer, segments in zip(puzzles, answers, result.segments.tolist(), strict=True):
        problems = verdict(answer, puzzle, box)
        valid += not problems
        layers = model.block_applications(depth.H_cycles, depth.L_cycles, segments) * model.config.layers
        print(format_grid(answer, box))
        print("".join(("." + box.symbols)[d] for d in answer))
        print(f"loops: {segments} of at most {depth.segments} segments ({layers:,} executed layers)")
        print(
            "valid: complete, keeps the givens, breaks no rule" if not problems else "NOT valid: " + "; ".join(problems)
        )
        print()
    if len(puzzles) > 1:
        print(f"{valid} of {len(puzzles)} answers are valid")
    return 0 if valid == len(puzzles) else 1
