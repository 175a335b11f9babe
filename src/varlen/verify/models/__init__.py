"""Proofs of models: change one document, and see what else moves."""
