"""Timings of kernels, products and modules against BF16 and installed peers: what ``narrowgate bench`` runs."""
