"""Packs of documents whose lengths are known; each step's packs depend only on store, settings, seed and number."""
