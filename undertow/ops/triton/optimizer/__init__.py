"""The optimizer's step on a GPU: AdamW and the scaling of gradients for many tensors in few launches, and symmetric
products for Muon's iteration."""
