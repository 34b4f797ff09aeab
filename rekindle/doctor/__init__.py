"""Whether a machine, a cluster or a pod has all that a run needs."""
