"""Data sources and the loader that turns any of them into batches."""
