"""Kueue's queues and quotas, compared with the pods of a manifest before it is submitted."""
