"""Packs straight from documents of unknown lengths: rounds of lanes, and nothing is written."""
