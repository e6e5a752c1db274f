"""Puzzle tables with the columns of Sudoku-Extreme (source, question, answer, rating), from CSV files or `datasets`."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from data.arrays import Split, split_from_puzzles
from data.generate import Puzzles
from data.sudoku import Box, check_givens, is_complete_solution, parse_puzzle, rule_violations
from trainer.errors import UserError

_CHUNK = 50_000
Row = tuple[str, str, str, str]
"""Where it stands (for messages), question, answer, rating; rating "" if there is none."""


def load_csv_puzzles(path: Path, box: Box, with_answers: bool = True) -> Split:
    """A user's own puzzles: a CSV with columns question and, unless with_answers is false, answer.

    Without answers the labels are all 0. Other columns are ignored, except rating. Raises UserError naming the file and
    the line of the first fault; an answer must be a valid completion of its question.
    """
    puzzles = read_csv(Path(path), box, with_answers)
    split = split_from_puzzles(puzzles)
    if not with_answers:
        split.labels[:] = 0
    return split


def read_csv(path: Path, box: Box, with_answers: bool = True) -> Puzzles:
    """All puzzles of a CSV file. Without answers, solutions are all 0. Raises UserError as `load_csv_puzzles`."""
    if not path.is_file():
        raise UserError(
            f"{path}: {'a folder' if path.is_dir() else 'no such file'}; give a CSV with columns question and answer"
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return table_puzzles(_csv_rows(file, path, with_answers), box, with_answers, str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _csv_rows(lines: Iterable[str], path: Path, with_answers: bool) -> Iterator[Row]:
    reader = csv.reader(lines)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        needed = ["question", "answer"] if with_answers else ["question"]
        missing = [name for name in needed if name not in header]
        if missing:
            raise UserError(
                f"{path}, line 1: no column {' and no column '.join(missing)}; the first line must name the columns "
                f"{', '.join(needed)} (it reads {','.join(header)[:80]!r})"
            )
        question = header.index("question")
        answer = header.index("answer") if with_answers else -1
        rating = header.index("rating") if "rating" in header else -1
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields, {len(header)} expected; the file may be "
                    "cut off: get it again or mend the line"
                )
            place = f"{path}, line {reader.line_num}"
            yield (
                place,
                fields[question].strip(),
                fields[answer].strip() if with_answers else "",
                fields[rating].strip() if rating >= 0 else "",
            )
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not readable as CSV ({error})") from error


def table_puzzles(rows: Iterable[Row], box: Box, with_answers: bool, origin: str) -> Puzzles:
    """Checked puzzles from rows. Raises UserError at the first faulty row, or when there is none at all."""
    parts: list[Puzzles] = []
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK:
            parts.append(_checked(chunk, box, with_answers))
            chunk = []
    if chunk:
        parts.append(_checked(chunk, box, with_answers))
    if not parts:
        raise UserError(f"{origin}: no puzzles; expected at least one row below the column names")
    return Puzzles(
        np.concatenate([part.puzzles for part in parts]),
        np.concatenate([part.solutions for part in parts]),
        np.concatenate([part.rating for part in parts]),
    )


def _checked(rows: list[Row], box: Box, with_answers: bool) -> Puzzles:
    places, questions, answers, ratings = zip(*rows, strict=True)
    puzzles = _parse_column(questions, places, "question", box)
    if with_answers:
        solutions = _parse_column(answers, places, "answer", box)
        right = is_complete_solution(torch.from_numpy(solutions), torch.from_numpy(puzzles), box).numpy()
        for i in np.flatnonzero(~right)[:1].tolist():
            faults = rule_violations(solutions[i], box)
            changed = np.flatnonzero((puzzles[i] > 0) & (puzzles[i] != solutions[i]))
            if len(changed):
                row, column = divmod(int(changed[0]), box.digits)
                faults.insert(0, f"it changes the given at row {row + 1} column {column + 1}")
            raise UserError(f"{places[i]}: the answer does not solve the question: {faults[0]}; correct the row")
    else:
        solutions = np.zeros_like(puzzles)
        for place, puzzle in zip(places, puzzles, strict=True):
            _at(place, "question", lambda puzzle=puzzle: check_givens(puzzle, box))
    return Puzzles(puzzles, solutions, _parse_ratings(ratings, places))


def _parse_column(texts: Sequence[str], places: Sequence[str], column: str, box: Box) -> np.ndarray:
    """Digits uint8[N, S] of a column. Plain rows are converted together; any other goes through `parse_puzzle`."""
    digit_of = np.full(256, 255, np.uint8)
    digit_of[[ord(blank) for blank in "0."]] = 0
    for digit, symbol in enumerate(box.symbols, start=1):
        digit_of[ord(symbol)] = digit
    cells = box.cells
    joined = "".join(text if len(text) == cells and text.isascii() else "?" * cells for text in texts)
    digits = digit_of[np.frombuffer(joined.encode("ascii"), np.uint8)].reshape(len(texts), cells)
    for i in np.flatnonzero((digits == 255).any(axis=1)).tolist():
        digits[i] = _at(places[i], column, lambda i=i: parse_puzzle(texts[i], box))
    return digits


def _at(place: str, column: str, check):
    """The result of check(), its UserError completed by the place in the file."""
    try:
        return check()
    except UserError as error:
        raise UserError(f"{place}, {column}: {str(error).removeprefix('puzzle: ')}") from error


def _parse_ratings(texts: Sequence[str], places: Sequence[str]) -> np.ndarray:
    ratings = np.empty(len(texts), np.int32)
    for i, text in enumerate(texts):
        try:
            ratings[i] = int(float(text)) if text else -1
        except (ValueError, OverflowError) as error:
            raise UserError(f"{places[i]}: rating {text!r} is not a number; correct it or drop the column") from error
    return ratings
