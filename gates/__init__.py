"""narrowgate.gates."""
