"""Runs of the past: the weeks that a schedule missed."""
