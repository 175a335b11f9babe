"""How documents get into packed rows: the releases' own packs, better ones, alignment, and files written ahead."""
