"""Stored templates and schedules have versions, as on an API server."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.state.stored_objects import (
    ObjectConflict,
    ObjectExists,
    ObjectMissing,
    StoredObjects,
)
from tests import builders

SPEC = {
    "entrypoint": "main",
    "templates": [{"name": "main", "container": builders.make_shell_container("true")}],
}


def make_template(name: str = "shared", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": {"name": name},
        "spec": {**SPEC, **spec},
    }


def test_an_object_gets_a_version_that_grows_with_each_change(tmp_path: Path) -> None:
    objects = StoredObjects(tmp_path)
    first_object = objects.create(make_template())
    other = objects.create(make_template("other"))
    assert first_object["metadata"]["generation"] == 1
    assert int(other["metadata"]["resourceVersion"]) > int(
        first_object["metadata"]["resourceVersion"]
    )

    changed = objects.replace({**first_object, "spec": {**SPEC, "parallelism": 2}})
    assert changed["metadata"]["generation"] == 2
    assert changed["metadata"]["uid"] == first_object["metadata"]["uid"]
    assert changed["metadata"]["creationTimestamp"] == first_object["metadata"]["creationTimestamp"]
    assert int(changed["metadata"]["resourceVersion"]) == objects.version()
    assert [item["metadata"]["name"] for item in objects.list("WorkflowTemplate")] == [
        "other",
        "shared",
    ]


def test_a_change_of_an_old_version_is_refused(tmp_path: Path) -> None:
    objects = StoredObjects(tmp_path)
    first_object = objects.create(make_template())
    objects.replace({**first_object, "spec": {**SPEC, "parallelism": 2}})
    with pytest.raises(ObjectConflict, match="was changed in the meantime"):
        objects.replace({**first_object, "spec": {**SPEC, "parallelism": 3}})
    assert objects.get("WorkflowTemplate", "shared")["spec"]["parallelism"] == 2


def test_an_object_is_created_only_once_and_a_missing_one_is_named(tmp_path: Path) -> None:
    objects = StoredObjects(tmp_path)
    objects.create(make_template())
    with pytest.raises(ObjectExists, match='WorkflowTemplate "shared" exists already'):
        objects.create(make_template())

    assert objects.delete("WorkflowTemplate", "shared")["metadata"]["name"] == "shared"
    for change in (
        lambda: objects.get("WorkflowTemplate", "shared"),
        lambda: objects.replace(make_template()),
        lambda: objects.delete("WorkflowTemplate", "shared"),
    ):
        with pytest.raises(ObjectMissing, match='"shared" does not exist'):
            change()
    assert objects.list("WorkflowTemplate") == []


def test_a_name_from_outside_does_not_leave_the_folder(tmp_path: Path) -> None:
    objects = StoredObjects(tmp_path)
    for name in ("../escape", "", "a/b"):
        with pytest.raises(ConfigError, match="is invalid: metadata"):
            objects.create(make_template(name))
        assert objects.find("WorkflowTemplate", name) is None
    assert not (tmp_path / "objects/escape.json").exists()


def test_templates_of_a_workflows_file_get_a_version_and_keep_it_if_unchanged(
    tmp_path: Path,
) -> None:
    cluster = LocalCluster(tmp_path)
    objects = StoredObjects(tmp_path)
    cluster.store_objects([make_template()])
    first_object = objects.get("WorkflowTemplate", "shared")
    cluster.store_objects([make_template()])
    assert objects.get("WorkflowTemplate", "shared") == first_object

    cluster.store_objects([make_template(parallelism=1)])
    second = objects.get("WorkflowTemplate", "shared")
    assert second["metadata"]["uid"] == first_object["metadata"]["uid"]
    assert second["metadata"]["generation"] == 2


def test_the_status_survives_a_new_spec(tmp_path: Path) -> None:
    objects = StoredObjects(tmp_path)
    objects.create(make_template())

    def start(stored_object: dict[str, Any]) -> None:
        stored_object["status"] = {"phase": "Active"}

    objects.update("WorkflowTemplate", "shared", start)
    applied = objects.apply(make_template(parallelism=1))
    assert applied["status"] == {"phase": "Active"}
    assert applied["metadata"]["generation"] == 2
