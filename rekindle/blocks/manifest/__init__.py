"""Reads a config and renders its manifest."""
