"""Proof that a model keeps packed documents apart, by changing one and watching the others."""
