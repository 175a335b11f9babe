"""varlen's batches and plans in other frameworks' spelling: names and shapes only, no decisions."""

from varlen.missing import tell_of_missing

tell_of_missing(__name__)
