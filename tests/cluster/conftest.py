"""Fixtures of the tests that need a cluster, which run in a namespace of their own.

    export REKINDLE_TEST_IMAGE=example.com/rekindle@sha256:...
    REKINDLE_TEST_S3=http://minio.example.com:9000 ...
    make test-cluster

`namespace.NEEDED` lists the environment variables to set.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.faults import LONG_SETTINGS
from tests.cluster.namespace import create_namespace
from tests.cluster.run import Namespace, run_locally


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder_prefix = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder_prefix):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def namespace() -> Iterator[Namespace]:
    """The namespace of all tests; the namespace and its bucket are deleted at the end."""
    with create_namespace() as namespace:
        yield namespace


@pytest.fixture(scope="session")
def undisturbed(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights of a training without faults (faults.LONG), with one worker on this
    machine.

    The variable REKINDLE_TEST_UNDISTURBED may contain this sha256 from an earlier session with the
    same number of steps, which saves minutes.
    """
    sha256 = os.environ.get("REKINDLE_TEST_UNDISTURBED")
    if sha256:
        return sha256
    return run_locally(
        tmp_path_factory.mktemp("undisturbed"), *namespace.sets([*LONG_SETTINGS, "train.workers=1"])
    )["model_sha256"]
