"""Linear layer and cross-entropy in Triton: products by the matrix library, everything between them in one kernel."""
