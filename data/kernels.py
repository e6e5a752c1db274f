"""Compiled loops of puzzle generation: random numbers, search, minimal puzzles. `generate` is their readable front.

Numba's disk cache looks only at the file a function stands in: after a change to a helper here that
`symmetry_kernels` uses (mix, below, shuffle), touch that file too.

Grids are uint8[S] digits (0 blank); candidates are int32[S] bit masks (bit d - 1 for digit d).
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW_BITS = np.uint64(32)
ZERO, ONE = np.int64(0), np.int64(1)  # as arguments: numba compiles a function anew for every literal it is called with


def compiled(function: Callable) -> Any:
    """`function` compiled by numba without holding the GIL, kept on disk where there is a writable place for it."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no writable cache folder anywhere: compile in memory
        return numba.njit(nogil=True)(function)


def mix64(x: Any) -> Any:
    """The splitmix64 finaliser: a fixed scrambling of uint64 numbers (scalars when compiled, arrays in NumPy)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


mix = compiled(mix64)


@compiled
def below(state, n):
    """A random integer in [0, n); advances state uint64[1]."""
    state[0] += GOLDEN
    return np.int64(((mix(state[0]) >> _LOW_BITS) * np.uint64(n)) >> _LOW_BITS)


@compiled
def shuffle(values, first, count, state):
    """Random order of values[first : first + count], in place."""
    for i in range(count - 1, 0, -1):
        j = below(state, i + 1)
        values[first + i], values[first + j] = values[first + j], values[first + i]


@compiled
def shuffle_lines(lines, groups, size, state):
    """Fill lines[groups * size] with a random order of rows (or columns): groups move whole, lines move within them."""
    starts = np.arange(groups)
    shuffle(starts, 0, groups, state)
    for g in range(groups):
        for i in range(size):
            lines[g * size + i] = starts[g] * size + i
        shuffle(lines, g * size, size, state)


# --- search ----------------------------------------------------------------------------------------------------------


@compiled
def copy(source, target):
    """target[:] = source, without the 2 seconds numba takes to compile that statement's error message."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@compiled
def propagate(candidates, peers, units, queue, queued):
    """Naked and hidden singles until nothing changes; False on a contradiction.

    queue int32[S]: its first `queued` cells have just been given a single candidate. peers int32[S, P]: cells sharing a
    unit with a cell. units int32[3 digits, digits].
    """
    full = (1 << units.shape[1]) - 1
    head = 0
    while True:
        while head < queued:
            cell = queue[head]
            head += 1
            bit = candidates[cell]
            for j in range(peers.shape[1]):
                peer = peers[cell, j]
                if candidates[peer] & bit:
                    rest = candidates[peer] ^ bit
                    if rest == 0:
                        return False
                    candidates[peer] = rest
                    if rest & (rest - 1) == 0:
                        queue[queued] = peer
                        queued += 1
        before = queued
        for u in range(units.shape[0]):
            once = 0
            twice = 0
            for j in range(units.shape[1]):
                mask = candidates[units[u, j]]
                twice |= once & mask
                once |= mask
            if once != full:
                return False
            once &= ~twice
            if once == 0:
                continue
            for j in range(units.shape[1]):
                cell = units[u, j]
                hidden = candidates[cell] & once
                if hidden and hidden != candidates[cell]:
                    if hidden & (hidden - 1):  # two digits that only this cell could take
                        return False
                    candidates[cell] = hidden
                    queue[queued] = cell
                    queued += 1
        if queued == before:
            return True


@compiled
def start(grid, candidates, peers, units, units_of, queue):
    """Candidates of a puzzle after propagation; False on a contradiction. They are narrowed from what is there already.

    units_of int32[S, 3]: the units a cell belongs to.
    """
    used = np.zeros(units.shape[0], np.int32)
    for cell in range(grid.shape[0]):
        if grid[cell]:
            bit = 1 << (grid[cell] - 1)
            for j in range(3):
                if used[units_of[cell, j]] & bit:
                    return False
                used[units_of[cell, j]] |= bit
            candidates[cell] = bit
    queued = ZERO
    for cell in range(grid.shape[0]):
        if grid[cell] == 0:
            taken = used[units_of[cell, 0]] | used[units_of[cell, 1]] | used[units_of[cell, 2]]
            rest = candidates[cell] & ~taken
            if rest == 0:
                return False
            candidates[cell] = rest
            if rest & (rest - 1) == 0:
                queue[queued] = cell
                queued += 1
    return propagate(candidates, peers, units, queue, queued)


@compiled
def search(stack, peers, units, queue, limit, max_guesses, random_order, state, solution):
    """Depth-first search from the propagated candidates stack[0]; stack int32[S + 1, S] is scratch.

    Guesses in the first cell with the fewest candidates, smallest digit first (random_order 1: in random order). Stops at `limit`
    solutions; the first goes to solution (uint8[S]). Returns (solutions found, guesses); found is -1 when more than
    max_guesses would be needed.
    """
    cells = stack.shape[1]
    branch = np.empty(cells + 1, np.int32)
    untried = np.empty(cells + 1, np.int32)
    depth = 0
    found = 0
    guesses = 0
    while True:
        candidates = stack[depth]
        fewest = 99
        for cell in range(cells):
            mask = candidates[cell]
            count = 1
            while mask & (mask - 1):
                mask &= mask - 1
                count += 1
            if 1 < count < fewest:
                fewest = count
                branch[depth] = cell
                if count == 2:
                    break
        if fewest == 99:
            if found == 0:
                for cell in range(cells):
                    digit = 1
                    while candidates[cell] >> digit:
                        digit += 1
                    solution[cell] = digit
            found += 1
            if found == limit:
                return found, guesses
            depth -= 1
        else:
            untried[depth] = candidates[branch[depth]]
        while depth >= 0:
            if untried[depth] == 0:
                depth -= 1
                continue
            if guesses == max_guesses:
                return -1, guesses
            guesses += 1
            rest = untried[depth]
            if random_order:
                count = 0
                mask = rest
                while mask:
                    mask &= mask - 1
                    count += 1
                for _ in range(below(state, count)):
                    rest &= rest - 1
            bit = rest & -rest
            untried[depth] ^= bit
            copy(stack[depth], stack[depth + 1])
            stack[depth + 1, branch[depth]] = bit
            queue[0] = branch[depth]
            if propagate(stack[depth + 1], peers, units, queue, ONE):
                depth += 1
                break
        if depth < 0:
            return found, guesses


@compiled
def solve_grid(grid, peers, units, units_of, limit, max_guesses, solution):
    """(solutions found up to limit, guesses) of a puzzle uint8[S]; the first solution goes to solution uint8[S]."""
    cells = grid.shape[0]
    stack = np.empty((cells + 1, cells), np.int32)
    queue = np.empty(cells + 1, np.int32)
    stack[0] = (1 << units.shape[1]) - 1
    if not start(grid, stack[0], peers, units, units_of, queue):
        return 0, 0
    return search(stack, peers, units, queue, limit, max_guesses, ZERO, np.zeros(1, np.uint64), solution)


@compiled
def make_puzzles(keys, peers, units, units_of, hard, attempts, max_guesses, puzzles, solutions, rating):
    """One minimal puzzle per key (uint64[n]), into puzzles and solutions uint8[n, S] and rating int32[n].

    hard: draw until singles alone do not solve the puzzle. A row that fails `attempts` times gets rating -1.
    """
    cells = peers.shape[0]
    full = (1 << units.shape[1]) - 1
    stack = np.empty((cells + 1, cells), np.int32)
    queue = np.empty(cells + 1, np.int32)
    order = np.empty(cells, np.int64)
    scratch = np.empty(cells, np.uint8)
    state = np.empty(1, np.uint64)
    for i in range(keys.shape[0]):
        state[0] = keys[i]
        rating[i] = -1
        puzzle = puzzles[i]
        for _ in range(attempts):
            found = 0
            while found != 1:  # a random filling that gets lost starts anew
                stack[0] = full
                found, guesses = search(stack, peers, units, queue, ONE, 20 * cells, ONE, state, solutions[i])
            copy(solutions[i], puzzle)
            for cell in range(cells):
                order[cell] = cell
            shuffle(order, 0, cells, state)
            for cell in order:
                # Can the cell be anything else? If so, the clue is needed, and stays needed with fewer clues around.
                digit = puzzle[cell]
                puzzle[cell] = 0
                stack[0] = full
                stack[0, cell] = full ^ (1 << (digit - 1))
                if start(puzzle, stack[0], peers, units, units_of, queue):
                    found, guesses = search(stack, peers, units, queue, ONE, max_guesses, ZERO, state, scratch)
                    if found:
                        puzzle[cell] = digit
            stack[0] = full
            start(puzzle, stack[0], peers, units, units_of, queue)
            found, guesses = search(stack, peers, units, queue, ONE + ONE, max_guesses, ZERO, state, scratch)
            if guesses > 0 or not hard:
                rating[i] = guesses
                break
