"""What TRL offers for packing, with its names, arguments and outputs."""

from varlen.adapters.trl.packing import pack_dataset

__all__ = ["pack_dataset"]
