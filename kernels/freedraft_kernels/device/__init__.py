"""Triton kernels. Each module needs triton to be installed, and is imported only when it is used."""
