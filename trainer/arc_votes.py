"""ARC's score: undo the augmentation of every predicted copy, vote, and count the tasks solved by the K best candidates.

Candidates of a test pair are the distinct grids predicted for it; they rank by votes, then by the mean probability of the
halting head, then by first appearance. Follows the released TRM's evaluator (parity README, section 4), except that votes
never outlive one evaluation, and that a pair without predictions keeps its place in the submission.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.arc import Augmentation, crop

PASS_AT = (1, 2, 5, 10, 100, 1000)
Task = dict[str, list[dict[str, list[list[int]]]]]
"""A task as in the public JSON files: train and test, lists of input and output grids."""


def grid_key(grid: np.ndarray) -> str:
    """sha256 of a grid's shape and colours."""
    return hashlib.sha256(bytes(grid.shape) + grid.astype(np.uint8).tobytes()).hexdigest()


@dataclass
class Candidate:
    """A grid predicted for one test pair."""

    grid: np.ndarray
    votes: int = 0
    probability: float = 0.0
    """Sum over votes."""


@dataclass
class ArcVotes:
    """Predictions of one evaluation, by task and test input. `tasks` names what must be solved."""

    tasks: dict[str, Task]
    identifiers: Sequence[str]
    """Name of each puzzle identifier; 0 is padding."""
    found: dict[tuple[str, str], dict[str, Candidate]] = field(default_factory=dict)
    """Candidates by (task, key of the test input), in order of appearance."""

    def add(self, inputs: np.ndarray, puzzle_ids: np.ndarray, answers: np.ndarray, halt_logits: np.ndarray) -> None:
        """Count a batch: inputs and answers [B, canvas^2] tokens, puzzle_ids [B], halt_logits [B]. Padding is skipped."""
        for tokens, number, answer, logit in zip(inputs, puzzle_ids, answers, halt_logits, strict=True):
            if number == 0:
                continue
            task, augmentation = Augmentation.of_name(self.identifiers[int(number)])
            pair = task, grid_key(augmentation.undo(crop(tokens)))
            grid = augmentation.undo(crop(answer))
            candidate = self.found.setdefault(pair, {}).setdefault(grid_key(grid), Candidate(grid))
            candidate.votes += 1
            candidate.probability += 1 / (1 + math.exp(-float(logit)))

    def ranking(self, task: str, test_input: list[list[int]]) -> list[Candidate]:
        """Candidates of one test pair, best first."""
        candidates = self.found.get((task, grid_key(np.asarray(test_input, np.uint8))), {}).values()
        return sorted(candidates, key=lambda c: (-c.votes, -c.probability / c.votes))

    def solved(self, task: str, most: int) -> list[bool]:
        """Per test pair of a task: whether one of its `most` best candidates is right."""
        return [
            grid_key(np.asarray(pair["output"], np.uint8))
            in {grid_key(c.grid) for c in self.ranking(task, pair["input"])[:most]}
            for pair in self.tasks[task]["test"]
        ]

    def pass_at(self, most: int) -> float:
        """Mean over tasks of the share of their test pairs solved within `most` attempts."""
        shares = [np.mean(self.solved(task, most)) for task in self.tasks]
        return float(np.mean(shares))

    def submission(self, attempts: int = 2) -> dict[str, list[dict[str, Any]]]:
        """The official format: for every test pair in order, attempt_1, attempt_2, ...

        The best candidate stands in for those that are missing, and an empty grid where there is none at all.
        """

        def attempts_at(ranking: list[Candidate]) -> dict[str, Any]:
            grids = [c.grid.tolist() for c in ranking[:attempts]] or [[]]
            grids += grids[:1] * (attempts - len(grids))
            return {f"attempt_{i}": grid for i, grid in enumerate(grids, start=1)}

        return {
            name: [attempts_at(self.ranking(name, pair["input"])) for pair in task["test"]]
            for name, task in self.tasks.items()
        }
