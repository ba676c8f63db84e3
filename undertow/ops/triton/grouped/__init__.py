"""Products of ragged batches of rows with one matrix per expert, in Triton."""
