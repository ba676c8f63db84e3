"""Sparse attention in Triton, forward and backward, for the three layer types."""
