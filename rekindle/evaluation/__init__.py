"""Judges trained models: what a workload that defines `examples` and `predict` gets from the engine."""
