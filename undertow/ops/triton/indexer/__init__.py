"""The lightning indexer in Triton: scores, the choice of the best, and the distillation that teaches it."""
