"""Products with weights in Triton whose rows have the same bits whatever shares the call."""
