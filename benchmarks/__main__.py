"""`python -m benchmarks`: settle the number of threads, then run sections, or a study with its own result file."""

import importlib
import os
import sys

# Libraries read these when first imported: one thread each, no call home and no bars drawn while timing.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TQDM_DISABLE="1",
)

if __name__ == "__main__":
    study = sys.argv[1] if sys.argv[1:2] in (["strategies"], ["plan"]) else None
    module = importlib.import_module(f"benchmarks.{study}.run" if study else "benchmarks.run")
    sys.exit(module.main(sys.argv[2:] if study else sys.argv[1:]))
