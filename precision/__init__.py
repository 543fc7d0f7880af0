"""narrowgate.precision."""
