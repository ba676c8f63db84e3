"""Clamped SwiGLU in Triton: one pass forward, one backward, from gate and up as the products before it left them."""
