"""Where the kernels for GPUs run in tests: on the GPU of this machine with JAXVLLM_TEST_GPU=1, else interpreted."""

import jax

INTERPRETED = jax.default_backend() == "cpu"
