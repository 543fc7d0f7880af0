"""Kernels of the models, each beside its plain PyTorch reference."""
