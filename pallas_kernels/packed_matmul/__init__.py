"""The matrix product with a matrix `[out, in]` that lies in memory in the order in which kernels for CPUs read it."""
