"""Rekindle: Argo Workflows, written with Hera, that train PyTorch models on preemptible nodes and lose nothing."""
