"""`python -m benchmarks`: settle the number of threads, then run."""

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
    if sys.argv[1:2] == ["strategies"]:  # a study of its own, with its own result file and page
        from benchmarks import strategies

        sys.exit(strategies.main(sys.argv[2:]))

    if sys.argv[1:2] == ["plan"]:  # simulated, with its own result file and page
        from benchmarks import plan

        sys.exit(plan.main(sys.argv[2:]))

    from benchmarks.run import main

    sys.exit(main())
