"""Other frameworks' spelling of batches, loaders, samplers and plans: names and shapes, no decisions.

    framework's data or settings ──► its folder here ──► pack, batch, feed ──► framework's form

In and out: what the framework has. A drop-in has its peer's arguments, defaults, attributes and errors.
Begin in the folder of the framework, such as `hf/__init__.py`; what several share stands in `features.py`
and `peers.py`.
"""

from varlen.missing import report_missing

report_missing(__name__)
