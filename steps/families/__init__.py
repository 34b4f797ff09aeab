"""The steps of a workload with several families: fit families without training steps, and choose
the best family."""
