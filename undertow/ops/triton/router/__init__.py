"""The router's tail in Triton: scores, the choice of the best experts, their weights, and the gradient of the logits.

The definition is `undertow.ops.reference.router`.
"""
