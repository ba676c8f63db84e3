"""Stages of a pipeline: what each rank holds, what passes between ranks, in which order, and how long it takes."""
