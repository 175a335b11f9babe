"""Packs straight from documents whose lengths nobody knows: rounds of lanes, and nothing is written."""
