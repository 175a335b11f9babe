"""What TRL offers for packing and for batches of packed rows, with its names, arguments and outputs."""

from varlen.adapters.trl.collator import DataCollatorForLanguageModeling
from varlen.adapters.trl.packing import pack_dataset

__all__ = ["DataCollatorForLanguageModeling", "pack_dataset"]
