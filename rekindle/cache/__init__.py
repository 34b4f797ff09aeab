"""Reuse of a step's outputs in later runs (docs/cache.md)."""
