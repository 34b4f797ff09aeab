"""The release of the workload `echo` that the tests of a module serve."""

from collections.abc import Iterator

import pytest

from rekindle.storage import Store
from tests.rekindle.serving.running import SERVER_PREFIX, write_release


@pytest.fixture(scope="module")
def store(s3_environment: dict[str, str]) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        yield Store.from_env()


@pytest.fixture(scope="module")
def sha256(store: Store) -> str:
    return write_release(store, SERVER_PREFIX)
