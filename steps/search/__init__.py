"""The steps of pipelines/sweep.py: choose trials, train them, and select the best trial."""
