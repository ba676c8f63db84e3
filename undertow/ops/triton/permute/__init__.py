"""Tokens to experts and back in Triton: the order of choices, rows and weights into that order, and the sum of rows.

The definition is `undertow.ops.reference.experts`. An order made here serves the reference too, and the other way
round: its numbers are int32 here, int64 there.
"""
