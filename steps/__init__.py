"""What runs inside a container: one step a module, and the training engine they share. Knows nothing of pipelines."""
