"""Sudoku: rules (`sudoku`), puzzles (`generate`), symmetries (`symmetry`), data sets (`build`), draws (`sampler`)."""
