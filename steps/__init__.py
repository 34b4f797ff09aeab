"""What runs in a container: one step a file, and the example workloads."""
