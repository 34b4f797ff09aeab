"""The steps of pipelines/sweep.py: train the trials, and select the best trial."""
