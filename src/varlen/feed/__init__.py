"""The loader: packs of the documents of a store or of a stream, the same bytes whatever happens."""
