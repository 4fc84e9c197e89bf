"""Kernels, one folder an operation: `api` checks and picks the backend, `reference` is XLA."""
