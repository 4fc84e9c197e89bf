"""What kernels for CPUs share: how they are written, how XLA calls them, and how they use its threads."""
