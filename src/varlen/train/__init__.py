"""The reference trainer behind `varlen train`: a causal model, packed documents, and exact resume."""
