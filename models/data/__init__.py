"""Data sources of the built-in models."""
