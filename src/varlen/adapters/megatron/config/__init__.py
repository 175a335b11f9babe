"""Megatron's training configurations: read in any form, checked against the rules of the release that runs them."""
