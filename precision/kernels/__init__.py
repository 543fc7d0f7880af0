"""Triton kernels. Each repeats, bit for bit, a plain-PyTorch reference that its docstring names."""
