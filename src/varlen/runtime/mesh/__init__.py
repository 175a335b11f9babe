"""One process a rank: which part of a step it runs, how it reaches the others, and what is wrong when one is gone."""
