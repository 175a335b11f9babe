"""What the fork server of the demo's runs imports: it compiles the kernels of `collate` once for all runs.

Importing this has that effect, so nothing else may import it. It matters where no folder can keep compiled kernels;
elsewhere it saves reading them fourteen times.
"""

from __future__ import annotations

import numpy as np

from varlen.batch.collate import collate
from varlen.train.demo.orders import batches_as_packing

lengths = np.array([3], dtype=np.int64)
packing = batches_as_packing(lengths, np.zeros((1, 1), dtype=np.int64), 3)
documents = (np.zeros(3, dtype=np.int32), np.array([0, 3], dtype=np.int64))  # the dtypes of the experiment
collate(documents, packing, layout="rows")
collate(documents, packing, layout="flat")
