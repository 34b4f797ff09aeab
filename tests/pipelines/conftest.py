"""The tests of this folder render outside of a repository: git needs longer to read the commit than
rendering takes."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def work_outside_of_the_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
        yield
