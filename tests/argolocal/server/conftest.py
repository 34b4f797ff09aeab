"""The tests in this folder run commands of argolocal, even if they run after tests of rekindle."""

import pytest

from argolocal.common import program


@pytest.fixture(autouse=True)
def argolocal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "name", "argolocal")
    monkeypatch.setattr(program, "cluster", "argolocal.runner.cluster:LocalCluster")
