"""Corpora, tokenizers, packing and byte entropies. A leaf: of Undertow it knows the errors alone, and no torch."""
