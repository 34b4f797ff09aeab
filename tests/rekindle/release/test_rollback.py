"""A rollback starts only the Deployment that the release itself has labelled with its version."""

from typing import Any

import pytest

from rekindle import tracking
from rekindle.release import rollback
from rekindle.release.promotion import Rollback
from rekindle.release.serve_config import VERSION_ANNOTATION


class Namespace:
    """The Deployments of two releases."""

    def deployments(self, model: str, on_malformed: Any = None) -> list[dict[str, Any]]:
        names = {"demo-aaaa": "1", "demo-bbbb": "2"}
        return [
            {"metadata": {"name": name, "annotations": {VERSION_ANNOTATION: version}}}
            for name, version in names.items()
        ] + [{"metadata": {"name": "demo-cccc"}}]


@pytest.mark.parametrize(
    ("deployment", "accepted"), [("demo-aaaa", True), ("demo-bbbb", False), ("demo-cccc", False)]
)
def test_a_client_of_mlflow_cannot_direct_a_rollback_to_another_version(
    deployment: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tracking.Release("1", "releases/demo/x", "ab", deployment)
    monkeypatch.setattr(tracking, "promoted_releases", lambda model: [release])
    objects: Any = Namespace()
    releases = rollback._map_deployments_by_version(objects, "demo")
    assert (list(releases) == ["1"]) is accepted
    assert rollback._has_deployment(releases, Rollback("1", deployment, "3", 1)) is accepted
