"""Steps that monitor runs and served models."""
