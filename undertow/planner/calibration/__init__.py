"""Measured runs, and what is fitted to them."""
