"""varlen's batches and plans in other frameworks' spelling: names and shapes only, no decisions."""
