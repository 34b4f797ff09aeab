"""Steps of pipelines/scoring.py: score the files in a folder of the object store."""
