"""Monitoring of releases: canary, prediction scores, drift."""
