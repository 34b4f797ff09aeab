"""Fixture: the secret of a run."""

import pytest

from rekindle.training.membership import handshake
from tests.rekindle.training.crew import SECRET


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.REKINDLE_SECRET, SECRET)
