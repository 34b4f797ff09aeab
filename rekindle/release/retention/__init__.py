"""Retention removes old runs and releases, except what a kept run, a kept release or the cache
needs.

`listing.py` lists the runs, releases and cache entries; `decision.py` chooses which of them to
remove; `removal.py` removes the chosen ones.
"""
