"""The steps of a workload with several families: fit a family without a training loop, and choose
the best family."""
