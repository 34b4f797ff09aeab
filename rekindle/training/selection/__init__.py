"""The families of a workload: fit those without training steps, and choose one by validation."""
