"""Proofs of batches: what would go wrong with one, before it does."""
