"""Fixtures for tests of the API: a server of the API with an empty home (directory of runs)."""

from collections.abc import Iterator

import pytest

from tests.argolocal.server.api.running import ApiServer, start_api


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with start_api(tmp_path_factory.mktemp("api") / "home") as server:
        yield server
