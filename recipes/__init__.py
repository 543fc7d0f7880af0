"""narrowgate.recipes."""
