"""Seconds: rates, layers, communication."""
