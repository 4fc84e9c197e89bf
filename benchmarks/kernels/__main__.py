"""Runs `session`, which measures ragged paged attention on this device: `python -m benchmarks.kernels`."""

# This import comes first, because it sets variables that jax reads when it is imported.
from benchmarks.kernels.session import main

main()
