"""Trials of a sweep that train by a program: their settings, their runs and their metric."""
