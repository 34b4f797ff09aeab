"""Handles the families of a workload, that is, the alternative models that it offers: fits families
without training steps, and chooses the best family."""
