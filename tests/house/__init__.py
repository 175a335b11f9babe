"""The rules of the house: each is a function from a checkout to the sentences that say who breaks it."""
