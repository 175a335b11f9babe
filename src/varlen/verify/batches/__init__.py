"""Checks of batches before they are used for training: `check.check_batch`."""
