"""Where the kernels for GPUs run in tests: on the GPU of this machine with `make test-gpu`, else interpreted."""

import jax

INTERPRETED = jax.default_backend() == "cpu"
