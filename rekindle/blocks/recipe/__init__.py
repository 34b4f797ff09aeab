"""Blocks for Rekindle's own steps: prepare → train → evaluate → release → deploy → verify."""
