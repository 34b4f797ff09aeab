"""The steps of pipelines/scoring.py: a model scores what lies in a folder of the object store."""
