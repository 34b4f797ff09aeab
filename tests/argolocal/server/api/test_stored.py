"""Tests of templates and CronWorkflows in the API of an Argo server: no object is lost or
overwritten without an error."""

import pytest

from argolocal.state.stored_objects import StoredObjects
from tests.argolocal.server.api.running import (
    ApiServer,
    Document,
    describe_error,
    make_cron_workflow,
    make_hello_workflow,
    make_stored_template,
)

# (URL path of the kind, field of the kind in a body, example)
KINDS = [
    ("/workflow-templates/argo", "template", make_stored_template("one")),
    (
        "/cluster-workflow-templates",
        "template",
        make_stored_template("one", "ClusterWorkflowTemplate"),
    ),
    ("/cron-workflows/argo", "cronWorkflow", make_cron_workflow("one")),
]
each_kind = pytest.mark.parametrize(("folder", "field", "example"), KINDS)


def set_name(example: Document, name: str) -> Document:
    return {**example, "metadata": {**example["metadata"], "name": name}}


@each_kind
def test_an_object_is_created_changed_listed_and_deleted(
    api: ApiServer, folder: str, field: str, example: Document
) -> None:
    created = api.change("POST", folder, {field: set_name(example, "life")})
    assert created["spec"] == example["spec"]
    assert created["metadata"]["uid"]
    assert created["metadata"].get("namespace") == ("argo" if folder.endswith("argo") else None)
    answer = api.send("POST", folder, {field: set_name(example, "life")})
    status, code, message = describe_error(answer)
    assert (status, code) == (409, 6)
    assert message.endswith('"life" already exists')

    changed = {**created, "metadata": {**created["metadata"], "labels": {"team": "b"}}}
    updated = api.change("PUT", f"{folder}/life", {field: changed})
    assert updated["metadata"]["labels"] == {"team": "b"}
    assert int(updated["metadata"]["resourceVersion"]) > int(created["metadata"]["resourceVersion"])
    assert updated["metadata"]["uid"] == created["metadata"]["uid"]
    assert api.get(f"{folder}/life") == updated

    # send the version of the object that was read first, which is now old
    status, code, message = describe_error(api.send("PUT", f"{folder}/life", {field: changed}))
    assert (status, code) == (409, 6)
    assert "the object has been modified" in message

    names = [item["metadata"]["name"] for item in api.get(folder)["items"]]
    assert "life" in names
    selected = api.get(folder, **{"listOptions.labelSelector": "team=b"})
    assert [item["metadata"]["name"] for item in selected["items"]] == ["life"]

    assert api.change("DELETE", f"{folder}/life") == {}
    for method in ("GET", "DELETE"):
        status, code, message = describe_error(api.send(method, f"{folder}/life"))
        assert (status, code) == (404, 5)
        assert message.endswith('"life" not found')


@each_kind
def test_an_object_that_argo_rejects_is_not_stored(
    api: ApiServer, folder: str, field: str, example: Document
) -> None:
    spec = {"entrypoint": "nothing", "templates": [{"name": "main", "container": {"image": "x"}}]}
    invalid_object = set_name(example, "broken")
    if example["kind"] == "CronWorkflow":
        invalid_object["spec"] = {"schedules": ["0 3 * * *"], "workflowSpec": spec}
    else:
        invalid_object["spec"] = spec
    for method, path in (("POST", folder), ("POST", f"{folder}/lint")):
        assert describe_error(api.send(method, path, {field: invalid_object}))[:2] == (400, 3)
    assert describe_error(api.send("GET", f"{folder}/broken"))[:2] == (404, 5)
    assert describe_error(api.send("POST", folder, {}))[:2] == (400, 3)
    assert api.change("POST", f"{folder}/lint", {field: example})["spec"] == example["spec"]


@each_kind
def test_a_list_in_pages_contains_each_object_once(
    api: ApiServer, folder: str, field: str, example: Document
) -> None:
    for number in range(3):
        api.change("POST", folder, {field: set_name(example, f"page-{number}")})
    first_page = api.get(folder, **{"listOptions.limit": 2})
    assert len(first_page["items"]) == 2
    second_page = api.get(folder, **{"listOptions.continue": first_page["metadata"]["continue"]})
    names = [item["metadata"]["name"] for item in [*first_page["items"], *second_page["items"]]]
    assert len(names) == len(set(names))
    assert {f"page-{number}" for number in range(3)} <= set(names)


def test_a_template_is_found_by_a_part_of_its_name(api: ApiServer) -> None:
    api.change(
        "POST", "/workflow-templates/argo", {"template": make_stored_template("needle-in-hay")}
    )
    found = api.get("/workflow-templates/argo", namePattern="in-h")
    assert [item["metadata"]["name"] for item in found["items"]] == ["needle-in-hay"]


def test_a_generated_name_of_a_template_is_unique(api: ApiServer) -> None:
    manifest = {**make_stored_template("x"), "metadata": {"generateName": "gen-"}}
    names = {
        api.change("POST", "/workflow-templates/argo", {"template": manifest})["metadata"]["name"]
        for _ in range(2)
    }
    assert len(names) == 2


def test_a_cron_workflow_is_suspended_and_resumed(api: ApiServer) -> None:
    api.change("POST", "/cron-workflows/argo", {"cronWorkflow": make_cron_workflow("paused")})
    for action, value in (("suspend", True), ("resume", False)):
        changed = api.change("PUT", f"/cron-workflows/argo/paused/{action}")
        assert changed["spec"]["suspend"] is value
        assert api.get("/cron-workflows/argo/paused")["spec"]["suspend"] is value


def test_an_update_keeps_the_last_time_of_a_cron_workflow(api: ApiServer) -> None:
    api.change("POST", "/cron-workflows/argo", {"cronWorkflow": make_cron_workflow("timed")})
    objects = StoredObjects(api.home)

    def run(document: Document) -> None:
        document["status"] = {"lastScheduledTime": "2026-01-01T03:00:00Z"}

    objects.update("CronWorkflow", "timed", run)
    api.change("PUT", "/cron-workflows/argo/timed", {"cronWorkflow": make_cron_workflow("timed")})
    stored = api.get("/cron-workflows/argo/timed")
    assert stored["status"] == {"lastScheduledTime": "2026-01-01T03:00:00Z"}


def test_an_object_of_another_name_or_namespace_is_refused(api: ApiServer) -> None:
    folder = "/workflow-templates/argo"
    api.change("POST", folder, {"template": make_stored_template("mine")})
    answer = api.send("PUT", f"{folder}/mine", {"template": make_stored_template("yours")})
    assert describe_error(answer)[:2] == (400, 3)
    other = make_stored_template("mine")
    other["metadata"]["namespace"] = "other"
    answer = api.send("POST", folder, {"template": other})
    assert describe_error(answer)[:2] == (400, 3)
    answer = api.send(
        "POST", "/workflow-templates/other", {"template": make_stored_template("mine")}
    )
    assert describe_error(answer)[:2] == (404, 5)
    assert api.get("/workflow-templates/other")["items"] is None


def test_a_workflow_uses_a_stored_template(api: ApiServer) -> None:
    api.change("POST", "/workflow-templates/argo", {"template": make_stored_template("shared")})
    manifest = make_hello_workflow()
    main_template = {"name": "main", "steps": [[{"name": "call", "templateRef": REFERENCE}]]}
    manifest["spec"]["templates"] = [main_template]
    name = api.submit(manifest)
    finished = api.wait(name)
    assert finished["status"]["phase"] == "Succeeded"
    assert "namespaced/shared/main" in finished["status"]["storedTemplates"]
    assert finished["spec"]["templates"][0]["steps"][0][0]["templateRef"] == REFERENCE


REFERENCE = {"name": "shared", "template": "main"}


def test_a_workflow_keeps_its_reference_and_shows_the_spec_that_it_resolved(
    api: ApiServer,
) -> None:
    api.change("POST", "/workflow-templates/argo", {"template": make_stored_template("base")})
    manifest = make_hello_workflow()
    manifest["spec"] = {"workflowTemplateRef": {"name": "base"}}

    finished = api.wait(api.submit(manifest))

    assert finished["status"]["phase"] == "Succeeded"
    assert finished["spec"] == {"workflowTemplateRef": {"name": "base"}}
    resolved = finished["status"]["storedWorkflowTemplateSpec"]
    assert resolved["templates"][0]["name"] == "main"
    assert resolved["arguments"]["parameters"] == [{"name": "message", "value": "hello"}]


def test_a_copy_of_a_workflow_uses_the_template_as_it_is_now(api: ApiServer) -> None:
    api.change("POST", "/workflow-templates/argo", {"template": make_stored_template("changing")})
    manifest = make_hello_workflow()
    manifest["spec"] = {"workflowTemplateRef": {"name": "changing"}}
    name = api.submit(manifest)
    api.wait(name)

    changed = make_stored_template("changing")
    changed["spec"]["templates"][0]["container"]["command"] = ["false"]
    changed["spec"]["templates"][0]["container"]["args"] = []
    api.change("PUT", "/workflow-templates/argo/changing", {"template": changed})
    copy = api.change("PUT", f"/workflows/argo/{name}/resubmit", {"name": name})

    assert api.wait(copy["metadata"]["name"])["status"]["phase"] == "Failed"
