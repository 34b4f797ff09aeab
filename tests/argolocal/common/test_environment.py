"""Processes that outlive a command get no secret of the user."""

import pytest

from argolocal.common.environment import remove_secrets


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "github_token", "DB_PASSWORD", "OPENAI_API_KEY", "NOTIFY_URL"]
)
def test_secrets_are_removed(name: str) -> None:
    assert remove_secrets({name: "x", "PATH": "/bin", "KEYBOARD": "de"}) == {
        "PATH": "/bin",
        "KEYBOARD": "de",
    }


def test_keys_of_services_are_kept_only_where_they_are_needed() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "MLFLOW_TRACKING_PASSWORD": "y", "AWS_REGION": "z"}
    assert remove_secrets(environ) == environ
    assert remove_secrets(environ, needs_services=False) == {"AWS_REGION": "z"}
