"""Convergence proofs: the records that runs leave (`shoal.train.proof`), compared, and explained where they differ."""
