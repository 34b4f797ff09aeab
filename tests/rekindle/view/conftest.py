"""The cluster that is one small HTTP server, as in tests/rekindle/cluster."""

from tests.rekindle.cluster.conftest import cluster, server

__all__ = ["cluster", "server"]
