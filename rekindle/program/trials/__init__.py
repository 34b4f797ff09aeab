"""Trials of a sweep whose model a program trains: their settings, their execution and their
metric."""
