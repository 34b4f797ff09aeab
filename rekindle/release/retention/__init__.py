"""Retention: removes old runs and releases, but nothing that a kept run, a release or the cache needs.

`listing.py` reads what exists, `decision.py` decides what to remove, and `removal.py` removes it.
"""
