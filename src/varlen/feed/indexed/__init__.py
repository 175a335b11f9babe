"""Packs of documents whose lengths are known: a function of the store, the seed and the step."""
