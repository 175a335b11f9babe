"""Lengths to packs: methods, kernels with readable references, overlong policies, windows, bounds and scores."""
