"""narrowgate.models."""
