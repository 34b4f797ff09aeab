"""Retention: removes old runs and releases, but nothing that a kept run, a release or the cache
needs.

`listing.py` reads the runs, releases and cache entries, `decision.py` chooses some of them, and
`removal.py` removes these.
"""
