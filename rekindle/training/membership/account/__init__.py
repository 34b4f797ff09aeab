"""Requests of a coordinator to the Kubernetes API, with the token of `cluster.signal_account`."""
