"""Documents in: reading files, the interpreter's own sources, and tokenizers; out come flat arrays."""
