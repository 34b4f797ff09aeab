"""Import the fixtures of tests/rekindle/cluster: a simulated cluster, which is a small HTTP
server."""

from tests.rekindle.cluster.conftest import cluster, server

__all__ = ["cluster", "server"]
