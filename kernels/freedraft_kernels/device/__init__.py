"""Triton kernels, and the operations that GPUs alone run. Each module needs triton, and is imported when it is used."""
