"""Megatron's training configurations: read in any form, checked against the rules of the release that runs them.

Begin in `check.py`; a rule is a function that `rules_data.py` or `rules_model.py` lists at its end.
"""
