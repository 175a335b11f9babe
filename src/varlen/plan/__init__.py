"""Work to ranks: weights divided into parts of even load, with kernels and readable references."""
