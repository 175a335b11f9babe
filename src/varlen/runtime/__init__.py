"""Slices on real models: their attention, their two passes, and what the machine's own kernels take for them."""
