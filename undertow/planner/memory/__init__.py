"""Memory of every rank, term by term: parameters, state, activations, and what is computed again."""
