"""What runs: slices beside the unsliced model, pipelines beside the simulator; `python -m benchmarks.running`."""
