"""A packing and its tokens to arrays: assembly, masks, labels, loss weights, context-parallel indices, torch."""
