"""Backfill of scheduled runs, and the trials of sweeps."""
