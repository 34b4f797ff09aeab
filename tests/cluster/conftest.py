"""The tests that need a cluster, in a namespace of their own.

    export REKINDLE_TEST_IMAGE=registry.example.com/rekindle:0.1 REKINDLE_TEST_S3=http://minio.example.com:9000 ...
    make test-cluster

place.NEEDED says what must be set.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.place import made
from tests.cluster.run import Place, local
from tests.cluster.story import LONG


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def place() -> Iterator[Place]:
    """One for all tests; gone at the end, and its bucket with it."""
    with made() as place:
        yield place


@pytest.fixture(scope="session")
def undisturbed(place: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights that nobody disturbed: those of story.LONG, by one worker, on this machine.

    REKINDLE_TEST_UNDISTURBED is that of an earlier session of as many steps, and saves minutes.
    """
    if known := os.environ.get("REKINDLE_TEST_UNDISTURBED"):
        return known
    return local(tmp_path_factory.mktemp("undisturbed"), *place.sets([*LONG, "train.workers=1"]))["model_sha256"]
