"""The families of a workload, which are the models that it offers: fits families without training
steps, and chooses a family by validation."""
