"""The steps of pipelines/sweep.py: which trials train, their training, and the best of them."""
