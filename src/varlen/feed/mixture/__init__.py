"""Packs of several sources, whose documents take turns by their shares of tokens."""
