"""The fastest plan that fits: what is searched, how, and the answer."""
