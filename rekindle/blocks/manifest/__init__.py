"""A config becomes a manifest."""
