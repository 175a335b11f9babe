"""InstructLab and fms-acceleration: their padding-free collators, with nothing learned across documents."""

from varlen.adapters.instructlab.collator import PaddingFreeCollator

__all__ = ["PaddingFreeCollator"]
