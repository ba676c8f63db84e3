"""The other way round: the smallest clusters, and the largest batch and sequence, that fit."""
