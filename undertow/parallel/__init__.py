"""Several processes: which ranks share what, how experts are reached over them, how weights are shared out."""
