"""Hyper-connections in Triton: `hyper_in` reads the streams for a sub-layer, `hyper_expand` writes its output back,
and `hyper_head` reads them last, with the kernels of `hyper_in` but for post, mix and Sinkhorn's iteration.

Names of the kernels, for T tokens, N streams of D numbers and ROWS coefficients, padded to OUT: (2 + N) N of them, or
the N of pre alone for the head.

    streams, x          `[T, N, D]`, any strides of tokens and streams
    fn                  `[ROWS, N D]` float32; parts: the same as three bfloat16 numbers that sum to it
    logits, root        `[T, ROWS]`, `[T]`: the projection by fn, and 1 / RMS of all streams, which is in it
    pre, post, mix      coefficients of a token: into the sub-layer, out of it, and from stream to stream
    y, inverse, out     the sum of the streams by pre, 1 / RMS of it, and both times the norm's weight
    slope               gradient of what a coefficient's sigmoid or Sinkhorn's iteration is taken of
    slopes              `[T, 2, OUT]`: the same times its scale and root, as two bfloat16 numbers that sum to it
"""
