"""Releases: evaluation of a model, the files of a release, its predictions, promotion and
rollback."""
