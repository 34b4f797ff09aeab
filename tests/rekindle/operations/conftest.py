"""Fixtures of tests/rekindle/cluster: a cluster that is one small HTTP server."""

from tests.rekindle.cluster.conftest import cluster, server

__all__ = ["cluster", "server"]
