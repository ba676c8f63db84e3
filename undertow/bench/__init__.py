"""Benchmarks: operators against their floors and peers, and whole training steps, each with its environment."""
