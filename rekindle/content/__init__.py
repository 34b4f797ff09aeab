"""Verification of datasets, weights and releases that were downloaded from the object store."""
