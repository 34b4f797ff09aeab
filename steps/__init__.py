"""The steps that run in containers, one file each, and the example workloads."""
