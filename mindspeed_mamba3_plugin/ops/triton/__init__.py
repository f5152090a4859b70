"""The operator's Triton kernels, in two families with the same entry points: `ascend` (plain Triton, runs on an
NPU, a GPU and in the interpreter) and `gpu` (tuned for NVIDIA)."""
