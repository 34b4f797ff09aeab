"""From a config to a manifest."""
