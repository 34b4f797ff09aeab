"""Tests of workflows in the API of an Argo server: each workflow is submitted exactly once, can be
found, and can be deleted safely."""

from pathlib import Path

import pytest

from tests.argolocal.server.api.running import (
    ApiServer,
    describe_error,
    make_api_workflow,
    make_cron_workflow,
    make_failing_workflow,
    make_gated_workflow,
    make_hello_workflow,
    make_long_workflow,
    make_step_template,
    make_stored_template,
    start_api,
)


def test_a_created_workflow_runs_and_has_the_fields_of_an_argo_server(api: ApiServer) -> None:
    name = api.submit(make_hello_workflow())
    assert name.startswith("w-")
    finished = api.wait(name)

    metadata = finished["metadata"]
    assert metadata["namespace"] == "argo"
    assert metadata["uid"]
    assert int(metadata["resourceVersion"]) > 0
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["labels"]["workflows.argoproj.io/phase"] == "Succeeded"
    assert metadata["labels"]["workflows.argoproj.io/completed"] == "true"

    status = finished["status"]
    assert status["phase"] == "Succeeded"
    assert status["progress"] == "1/1"
    assert {"type": "Completed", "status": "True"} in status["conditions"]
    node = status["nodes"][name]
    assert node["type"] == "Pod"
    assert node["progress"] == "1/1"
    for time in (status["startedAt"], status["finishedAt"], node["startedAt"]):
        assert len(time) == len("2026-01-01T00:00:00Z")


def test_a_name_can_be_used_once(api: ApiServer) -> None:
    api.submit(make_hello_workflow("once"))
    answer = api.send("POST", "/workflows/argo", {"workflow": make_hello_workflow("once")})
    assert describe_error(answer) == (409, 6, 'workflows.argoproj.io "once" already exists')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "workflow body not specified"),
        ({"workflow": {"kind": "Pod", "spec": {}}}, "must be a Workflow"),
        ({"workflow": {"metadata": {}, "spec": {"entrypoint": "nothing"}}}, "does not exist"),
        ({"workflow": 3}, "must be an object"),
        ([1], "must be a JSON object"),
    ],
)
def test_a_workflow_that_cannot_run_is_refused_with_the_reason(
    api: ApiServer, body: object, message: str
) -> None:
    for path in ("/workflows/argo", "/workflows/argo/lint"):
        status, code, text = describe_error(api.send("POST", path, body))
        assert (status, code) == (400, 3)
        assert message in text


def test_a_dry_run_and_lint_create_no_run(api: ApiServer) -> None:
    body = {"workflow": make_hello_workflow("dry"), "createOptions": {"dryRun": ["All"]}}
    assert api.change("POST", "/workflows/argo", body)["metadata"]["name"] == "dry"
    body = {"workflow": make_hello_workflow(), "serverDryRun": True}
    assert api.change("POST", "/workflows/argo", body)["metadata"]["name"].startswith("w-")
    linted = api.change("POST", "/workflows/argo/lint", {"workflow": make_hello_workflow("dry")})
    assert linted["spec"] == make_hello_workflow("dry")["spec"]
    assert api.send("GET", "/workflows/argo/dry").status_code == 404


def test_a_missing_workflow_is_not_found(api: ApiServer) -> None:
    answer = api.send("GET", "/workflows/argo/nothing")
    assert describe_error(answer) == (404, 5, 'workflows.argoproj.io "nothing" not found')
    for action in ("stop", "terminate", "suspend", "resume", "set", "retry", "resubmit"):
        answer = api.send("PUT", f"/workflows/argo/nothing/{action}", {})
        assert describe_error(answer)[:2] == (404, 5)


def test_another_namespace_has_no_workflows(api: ApiServer) -> None:
    name = api.submit(make_hello_workflow())
    assert api.get("/workflows/other")["items"] is None
    assert describe_error(api.send("GET", f"/workflows/other/{name}"))[:2] == (404, 5)
    answer = api.send("POST", "/workflows/other", {"workflow": make_hello_workflow()})
    assert describe_error(answer) == (404, 5, 'namespaces "other" not found')
    assert name in {item["metadata"]["name"] for item in api.get("/workflows/")["items"]}


def test_the_latest_workflow_has_an_alias(tmp_path: Path) -> None:
    with start_api(tmp_path / "home") as server:
        answer = server.send("GET", "/workflows/argo/@latest")
        assert describe_error(answer) == (404, 5, "no workflows found")
        for name in ("first", "second"):
            server.submit(make_hello_workflow(name))
            server.wait(name)
        assert server.workflow("@latest")["metadata"]["name"] == "second"


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory):
    """A server with three runs that have ended, and a run that waits."""
    with start_api(tmp_path_factory.mktemp("listed") / "home") as server:
        for name, manifest in (
            ("good", make_hello_workflow("good")),
            ("bad", make_failing_workflow("bad")),
        ):
            manifest["metadata"]["labels"] = {"team": name}
            server.submit(manifest)
            server.wait(name)
        server.submit(make_hello_workflow("other-good"))
        server.wait("other-good")
        server.submit(make_gated_workflow("open"))
        server.wait_until_suspended("open")
        yield server


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, ["open", "other-good", "bad", "good"]),
        ({"listOptions.labelSelector": "team"}, ["bad", "good"]),
        ({"listOptions.labelSelector": "team in (good,x)"}, ["good"]),
        ({"listOptions.labelSelector": "workflows.argoproj.io/phase=Failed"}, ["bad"]),
        ({"listOptions.labelSelector": "workflows.argoproj.io/completed!=true"}, ["open"]),
        ({"listOptions.fieldSelector": "metadata.name=bad"}, ["bad"]),
        ({"listOptions.fieldSelector": "metadata.name!=bad"}, ["open", "other-good", "good"]),
        ({"listOptions.fieldSelector": "metadata.namespace=argo"}, 4),
        (
            {"listOptions.fieldSelector": "metadata.name=good", "nameFilter": "Contains"},
            ["other-good", "good"],
        ),
        ({"createdAfter": "2000-01-01T00:00:00Z"}, 4),
        ({"createdAfter": "2100-01-01T00:00:00Z"}, 0),
        ({"finishedBefore": "2100-01-01T00:00:00Z"}, 3),
    ],
)
def test_a_list_contains_what_its_selectors_match(
    listed: ApiServer, parameters: dict[str, str], expected: list[str] | int
) -> None:
    items = listed.get("/workflows/argo", **parameters)["items"] or []
    names = [item["metadata"]["name"] for item in items]
    assert (names if isinstance(expected, list) else len(names)) == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"listOptions.labelSelector": "a b"}, "unable to parse"),
        ({"listOptions.fieldSelector": "spec.x=1"}, "unsupported requirement spec.x=1"),
        ({"listOptions.fieldSelector": "metadata.namespace=x"}, "contradict"),
        ({"listOptions.continue": "x"}, "listOptions.continue must be int"),
        ({"listOptions.continue": "-1"}, "listOptions.continue must >= 0"),
        ({"listOptions.limit": "x"}, "listOptions.limit"),
    ],
)
def test_a_malformed_selector_is_refused(
    listed: ApiServer, parameters: dict[str, str], message: str
) -> None:
    answer = listed.send("GET", "/workflows/argo", params=parameters)
    status, code, text = describe_error(answer)
    assert (status, code) == (400, 3)
    assert message in text


def test_a_list_in_pages_contains_each_workflow_once(listed: ApiServer) -> None:
    names: list[str] = []
    page = {"metadata": {"continue": "0"}}
    while "continue" in page["metadata"]:
        parameters = {"listOptions.limit": 3, "listOptions.continue": page["metadata"]["continue"]}
        page = listed.get("/workflows/argo", **parameters)
        names += [item["metadata"]["name"] for item in page["items"]]
    assert names == ["open", "other-good", "bad", "good"]


def test_a_client_gets_only_the_fields_that_it_names(listed: ApiServer) -> None:
    page = listed.get("/workflows/argo", fields="items.metadata.name,items.status.phase")
    assert page["items"][0] == {"metadata": {"name": "open"}, "status": {"phase": "Running"}}
    workflow = listed.get("/workflows/argo/good", fields="-status.nodes,spec")
    assert "spec" not in workflow
    assert "nodes" not in workflow["status"]
    assert workflow["status"]["phase"] == "Succeeded"


def test_a_deleted_workflow_is_gone_with_its_files(api: ApiServer) -> None:
    for manifest in (make_hello_workflow("ended"), make_long_workflow("active")):
        name = api.submit(manifest)
        api.wait(name, "Succeeded" if name == "ended" else "Running")
        assert api.change("DELETE", f"/workflows/argo/{name}") == {}
        assert describe_error(api.send("GET", f"/workflows/argo/{name}"))[:2] == (404, 5)
        assert not (api.home / "runs" / name).exists()
        # a run can have this name again
        assert api.submit(make_hello_workflow(name)) == name


def test_a_workflow_of_a_template_gets_the_options_of_its_submission(api: ApiServer) -> None:
    api.change("POST", "/workflow-templates/argo", {"template": make_stored_template("base")})
    cluster_template = {"template": make_stored_template("base", "ClusterWorkflowTemplate")}
    api.change("POST", "/cluster-workflow-templates", cluster_template)
    api.change("POST", "/cron-workflows/argo", {"cronWorkflow": make_cron_workflow("base")})

    for kind in ("WorkflowTemplate", "clusterworkflowtemplate", "cronwf"):
        options = {"parameters": ["message=given"], "labels": "a=b", "generateName": "own-"}
        body = {"resourceKind": kind, "resourceName": "base", "submitOptions": options}
        created = api.change("POST", "/workflows/argo/submit", body)
        finished = api.wait(created["metadata"]["name"])
        assert finished["metadata"]["name"].startswith("own-")
        assert finished["metadata"]["labels"]["a"] == "b"
        assert finished["status"]["phase"] == "Succeeded"
        parameters = finished["spec"]["arguments"]["parameters"]
        assert parameters == [{"name": "message", "value": "given"}]


def test_a_workflow_of_a_missing_template_or_kind_is_refused(api: ApiServer) -> None:
    body = {"resourceKind": "WorkflowTemplate", "resourceName": "nothing"}
    answer = api.send("POST", "/workflows/argo/submit", body)
    assert describe_error(answer)[:2] == (404, 5)
    answer = api.send("POST", "/workflows/argo/submit", {"resourceKind": "Pod"})
    assert describe_error(answer)[:2] == (400, 3)


def test_a_manifest_of_a_client_in_go_runs(api: ApiServer) -> None:
    """Go sends empty values for fields that the user has not set."""
    manifest = make_api_workflow(make_step_template("main", "echo hello"), name="from-go")
    manifest["metadata"]["creationTimestamp"] = None
    manifest["status"] = {"startedAt": None, "finishedAt": None}
    main_template = manifest["spec"]["templates"][0]
    main_template |= {"inputs": {}, "outputs": {}, "metadata": {}}
    main_template["container"] |= {"name": "", "resources": {}}
    manifest["spec"]["arguments"] = {}
    api.submit(manifest)
    assert api.wait("from-go")["status"]["phase"] == "Succeeded"
