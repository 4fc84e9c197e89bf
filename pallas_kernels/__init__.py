"""Kernels, with one folder for each operation: `api` checks and picks the backend, and `reference` is plain XLA."""
