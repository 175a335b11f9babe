"""Every kernel in plain Python, to be read and believed: what property tests hold the kernels against."""
