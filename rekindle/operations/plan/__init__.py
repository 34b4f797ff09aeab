"""Forecast of a run: its tasks, time, resources and release, without starting anything (`rekindle
plan`)."""
