"""RMSNorm and the rotary embedding in Triton, forward and backward: rows are read once and written once.

A program holds whole rows in its registers and goes from tile to tile of them. Sums run in float32 and in one order for
every row, which depends on its length and type alone: a row has the same bits whatever shares the call. An operand
whose address would keep a kernel from reading 16 bytes at a time, and so from that order, is copied.
"""
