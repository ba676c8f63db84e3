"""Compressor pooling in Triton: windows forward, windows and lone rows backward."""
