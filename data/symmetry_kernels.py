"""Compiled loops over symmetries: augmentation, invariants, canonical forms. `symmetry` is their readable front.

Grids are uint8[S] digits (0 blank), or tokens where said so.
"""

import numpy as np

from data.kernels import GOLDEN, ONE, ZERO, below, compiled, copy, mix, shuffle, shuffle_lines

TWO = ONE + ONE


@compiled
def augment_rows(inputs, labels, keys, box_rows, box_cols, new_inputs, new_labels):
    """Row i of tokens inputs and labels (uint8[n, S]) under the symmetry that keys[i] stands for; 0: unchanged."""
    n = box_rows * box_cols
    rows = np.empty(n, np.int64)
    cols = np.empty(n, np.int64)
    new_token = np.arange(n + 2)
    state = np.empty(1, np.uint64)
    for i in range(keys.shape[0]):
        if keys[i] == 0:
            copy(inputs[i], new_inputs[i])
            copy(labels[i], new_labels[i])
            continue
        state[0] = keys[i]
        for token in range(2, n + 2):
            new_token[token] = token
        shuffle(new_token, TWO, n, state)
        shuffle_lines(rows, box_cols, box_rows, state)
        shuffle_lines(cols, box_rows, box_cols, state)
        row_step, col_step = n, 1
        if box_rows == box_cols and below(state, TWO):
            row_step, col_step = 1, n
        to = 0
        for r in range(n):
            for c in range(n):
                cell = rows[r] * row_step + cols[c] * col_step
                new_inputs[i, to] = new_token[inputs[i, cell]]
                new_labels[i, to] = new_token[labels[i, cell]]
                to += 1


@compiled
def load_grid(row, way, out):
    """out int64[n, n] = a grid in row order (uint8[S]), transposed where way is 1."""
    n = out.shape[0]
    for r in range(n):
        for c in range(n):
            out[r, c] = row[c * n + r] if way else row[r * n + c]


@compiled
def line_signatures(grid, per_band, out):
    """A number per row of a solution int64[n, n] (uint64 out[n]) that no relabelling or column order changes.

    Two rows together are a permutation of the columns; its cycle lengths are what survives.
    """
    n = grid.shape[0]
    column_of = np.empty(n + 1, np.int64)
    seen = np.empty(n, np.bool_)
    out[:] = np.uint64(0)
    for a in range(n):
        for c in range(n):
            column_of[grid[a, c]] = c
        for b in range(n):
            if a == b:
                continue
            seen[:] = False
            total = np.uint64(0)
            for c in range(n):
                length = 0
                at = c
                while not seen[at]:
                    seen[at] = True
                    at = column_of[grid[b, at]]
                    length += 1
                if length:
                    total += mix(np.uint64(length) * GOLDEN)
            out[a] += mix(total + np.uint64(1 + (a // per_band == b // per_band)))


@compiled
def combine_lines(lines, per_band):
    """One number from row numbers uint64[n], the same for any order of bands and of rows in them."""
    total = np.uint64(0)
    for band in range(lines.shape[0] // per_band):
        inner = np.uint64(0)
        for i in range(per_band):
            inner += mix(lines[band * per_band + i] + GOLDEN)
        total += mix(inner)
    return total


@compiled
def invariants(puzzles, solutions, box_rows, box_cols, with_givens, out):
    """A uint64 per row that symmetric puzzles share (with_givens false: symmetric solutions)."""
    n = box_rows * box_cols
    square = box_rows == box_cols
    row_signs = np.empty(n, np.uint64)
    col_signs = np.empty(n, np.uint64)
    counts = np.empty((4, n + 1), np.uint64)  # givens per row, column, box and digit
    grid = np.empty((n, n), np.int64)
    for i in range(solutions.shape[0]):
        load_grid(solutions[i], ONE, grid)
        line_signatures(grid, box_cols, col_signs)
        load_grid(solutions[i], ZERO, grid)
        line_signatures(grid, box_rows, row_signs)
        rows, cols = combine_lines(row_signs, box_rows), combine_lines(col_signs, box_cols)
        out[i] = mix(mix(rows) + mix(cols)) if square else mix(mix(rows + GOLDEN) + mix(cols))
        if not with_givens:
            continue
        counts[:] = np.uint64(0)
        given = puzzles[i]
        for r in range(n):
            for c in range(n):
                if given[r * n + c]:
                    counts[0, r] += np.uint64(1)
                    counts[1, c] += np.uint64(1)
                    counts[2, r // box_rows * box_rows + c // box_cols] += np.uint64(1)
                    counts[3, grid[r, c]] += np.uint64(1)
        total = out[i]
        for r in range(n):
            for c in range(n):
                if given[r * n + c]:
                    across = mix(row_signs[r] + counts[0, r] * GOLDEN)
                    down = mix(col_signs[c] + counts[1, c] * GOLDEN)
                    if not square:
                        down = mix(down)
                    box = r // box_rows * box_rows + c // box_cols
                    total += mix(across + down + mix(counts[2, box] + GOLDEN) + mix(counts[3, grid[r, c]] - GOLDEN))
        out[i] = mix(total)


@compiled
def order_rows(keys, first, per_band, order):
    """The row order that puts row `first` on top, then its band, then the other bands, each by ascending keys."""
    n = keys.shape[0]
    order[0] = first
    filled = 1
    bands_done = 0
    band = first // per_band
    while True:
        begin = filled
        for r in range(band * per_band, (band + 1) * per_band):
            if r == first:
                continue
            at = filled
            while at > begin and keys[order[at - 1]] > keys[r]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = r
            filled += 1
        bands_done |= 1 << band
        if filled == n:
            return
        smallest = n
        for r in range(n):
            if not bands_done >> (r // per_band) & 1 and keys[r] < smallest:
                smallest = keys[r]
                band = r // per_band


@compiled
def canonical_rows(puzzles, solutions, box_rows, box_cols, col_orders, transpose, out):
    """The smallest symmetric copy of each row, into out uint8[N, 2 S]: solution digits (from 0), then given marks.

    Smallest: first the solution in row order, then the marks. With the first row on top and the columns in a given
    order, digits are renamed so that the top row reads 0, 1, 2, ..., and the order of the other rows follows from their
    first cells; so all top rows and all column orders (col_orders uint8[K, n]) cover every candidate.
    transpose: 0 never, 1 both ways, 2 always (a box shape whose rows have fewer orders than its columns).
    """
    n = box_rows * box_cols
    label = np.empty(n + 1, np.int64)
    keys = np.empty(n, np.int64)
    row_order = np.empty(n, np.int64)
    grid = np.empty((n, n), np.int64)
    given = np.empty((n, n), np.int64)
    best = np.empty((n, n), np.int64)
    best_given = np.empty((n, n), np.int64)
    for i in range(solutions.shape[0]):
        best[:] = n
        for way in range(1 if transpose == 2 else 0, 2 if transpose else 1):
            load_grid(solutions[i], way, grid)
            load_grid(puzzles[i], way, given)
            per_band = box_cols if way else box_rows
            for first in range(n):
                band = first // per_band * per_band
                for k in range(col_orders.shape[0]):
                    order = col_orders[k]
                    for c in range(n):
                        label[grid[first, order[c]]] = c
                    # Most candidates lose already in the second row, the band's row with the smallest first cell.
                    second = -1
                    for r in range(band, band + per_band):
                        if r != first and (second < 0 or label[grid[r, order[0]]] < label[grid[second, order[0]]]):
                            second = r
                    difference = 0
                    for c in range(n):
                        difference = label[grid[second, order[c]]] - best[1, c]
                        if difference:
                            break
                    if difference > 0:
                        continue
                    for r in range(n):
                        keys[r] = label[grid[r, order[0]]]
                    order_rows(keys, first, per_band, row_order)
                    for r in range(2, n):
                        if difference:
                            break
                        for c in range(n):
                            difference = label[grid[row_order[r], order[c]]] - best[r, c]
                            if difference:
                                break
                    if difference < 0:
                        for r in range(n):
                            for c in range(n):
                                best[r, c] = label[grid[row_order[r], order[c]]]
                        best_given[:] = 2
                    if difference <= 0:
                        difference = 0
                        for r in range(n):
                            for c in range(n):
                                mark = 1 if given[row_order[r], order[c]] else 0
                                if difference == 0:
                                    difference = mark - best_given[r, c]
                                if difference < 0:
                                    best_given[r, c] = mark
                            if difference > 0:
                                break
        for r in range(n):
            for c in range(n):
                out[i, r * n + c] = best[r, c]
                out[i, n * n + r * n + c] = best_given[r, c]
