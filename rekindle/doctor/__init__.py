"""Checks that a machine, a cluster or a pod has everything that a run needs."""
