"""Kernels in Triton, portable between architectures; off a GPU they run in Triton's interpreter."""
