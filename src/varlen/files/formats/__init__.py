"""Formats of files: a reader for each, from a file to batches of rows."""
