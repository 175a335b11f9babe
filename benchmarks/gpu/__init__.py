"""What needs a CUDA device, checked and measured in one run of ten minutes at most; `python -m benchmarks.gpu`."""
