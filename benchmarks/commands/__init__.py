"""Benchmarks of single commands."""
