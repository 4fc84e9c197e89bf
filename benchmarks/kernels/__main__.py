"""`python -m benchmarks.kernels`: ragged paged attention on the device at hand, see `session`."""

# First: it sets what jax reads at import.
from benchmarks.kernels.session import main

main()
