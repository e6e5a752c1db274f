"""Sudoku puzzles: rules (`sudoku`), generation (`generate`), symmetries (`symmetry`), data sets (`build`), `sampler`."""
