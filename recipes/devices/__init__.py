"""Measured rates of devices: one JSON file each, as ``scripts/bench_gemm_rates`` writes it."""
