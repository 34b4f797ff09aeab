"""The steps that watch runs and what they released."""
