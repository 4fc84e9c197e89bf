"""The base of all kernels for CPUs: how they are written, how XLA calls them, and how they use its threads."""
