"""Serving and sampling: weights, caches, replicas, the work of a token."""
