"""The steps of pipelines/sweep.py: choose trials, train them, select the best."""
