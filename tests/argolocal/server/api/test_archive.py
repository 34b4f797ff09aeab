"""Tests of the addresses of an Argo server for ended runs and their artifacts."""

import pytest

from tests.argolocal.server.api.running import (
    ApiServer,
    Document,
    describe_error,
    make_api_workflow,
    make_failing_workflow,
    make_gated_workflow,
    make_hello_workflow,
    make_step_template,
    make_steps_template,
)


@pytest.fixture(scope="module")
def ended(api: ApiServer) -> Document:
    manifest = make_failing_workflow("ended")
    manifest["metadata"]["labels"] = {"team": "a"}
    api.submit(manifest)
    return api.wait("ended")


def uid_of(document: Document) -> str:
    return document["metadata"]["uid"]


def test_the_archive_contains_the_runs_that_have_ended(api: ApiServer, ended: Document) -> None:
    open_name = api.submit(make_gated_workflow())
    node = api.wait_until_suspended(open_name)
    items = api.get("/archived-workflows", namespace="argo")["items"]
    names = {item["metadata"]["name"] for item in items}
    assert "ended" in names
    assert open_name not in names
    assert all("nodes" not in item["status"] for item in items)

    archived = api.get(f"/archived-workflows/{uid_of(ended)}")
    assert archived["status"]["nodes"] == ended["status"]["nodes"]
    answer = api.send("GET", f"/archived-workflows/{uid_of(api.workflow(open_name))}")
    assert describe_error(answer) == (404, 5, "not found")
    assert node["phase"] == "Running"


def test_labels_of_the_archive_are_listed(api: ApiServer, ended: Document) -> None:
    assert "team" in api.get("/archived-workflows-label-keys")["items"]
    values = api.get("/archived-workflows-label-values", **{"listOptions.labelSelector": "team"})
    assert values["items"] == ["a"]
    for selector in ("", "team=a", "a,b"):
        parameters = {"listOptions.labelSelector": selector}
        answer = api.send("GET", "/archived-workflows-label-values", params=parameters)
        assert describe_error(answer)[:2] == (400, 3)


def test_an_archived_run_is_resubmitted_retried_and_deleted(api: ApiServer) -> None:
    api.submit(make_failing_workflow("old"))
    address = f"/archived-workflows/{uid_of(api.wait('old'))}"
    copied = api.change("PUT", f"{address}/resubmit", {"parameters": ["code=0"]})
    assert api.wait(copied["metadata"]["name"])["status"]["phase"] == "Succeeded"
    api.change("PUT", f"{address}/retry", {"parameters": ["code=0"]})
    assert api.wait("old")["status"]["phase"] == "Succeeded"
    assert api.change("DELETE", address) == {}
    assert describe_error(api.send("GET", "/workflows/argo/old"))[:2] == (404, 5)


def first_node(document: Document) -> Document:
    nodes = document["status"]["nodes"].values()
    return next(node for node in nodes if node["displayName"] == "first")


def test_an_output_artifact_is_loaded_by_name_and_uid(api: ApiServer, ended: Document) -> None:
    node = first_node(ended)["id"]
    for path in (
        f"/artifacts/argo/ended/{node}/x",
        f"/artifacts-by-uid/{uid_of(ended)}/{node}/x",
        f"/artifact-files/argo/workflows/ended/{node}/outputs/x",
        f"/artifact-files/argo/archived-workflows/{uid_of(ended)}/{node}/outputs/x",
    ):
        answer = api.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"x\n"), path
        assert "sandbox" in answer.headers["content-security-policy"]


def test_an_input_artifact_and_a_file_of_a_folder_are_loaded(api: ApiServer) -> None:
    plain = {"archive": {"none": {}}}
    made = {"artifacts": [{"name": "folder", "path": "/tmp/folder", **plain}]}
    maker = make_step_template(
        "make", "mkdir -p /tmp/folder/a; echo b > /tmp/folder/a/b", outputs=made
    )
    taken = {"artifacts": [{"name": "taken", "path": "/tmp/taken"}]}
    taker = make_step_template("take", "cat /tmp/taken/a/b", inputs=taken)
    main_template = make_steps_template("make", "take")
    source = "{{steps.make.outputs.artifacts.folder}}"
    main_template["steps"][1][0]["arguments"] = {"artifacts": [{"name": "taken", "from": source}]}
    name = api.submit(make_api_workflow(main_template, maker, taker))
    finished = api.wait(name)
    assert finished["status"]["phase"] == "Succeeded"
    nodes = {node["displayName"]: node["id"] for node in finished["status"]["nodes"].values()}

    outputs = f"/artifact-files/argo/workflows/{name}/{nodes['make']}/outputs/folder"
    inputs = f"/artifact-files/argo/workflows/{name}/{nodes['take']}/inputs/taken"
    for folder in (outputs, inputs):
        assert api.client.get(f"{folder}/a/b").content == b"b\n"
        assert 'href="./a/"' in api.client.get(f"{folder}/").text
        for path in ("a/../../../x", "..%2f..%2fx", "nothing"):
            assert api.client.get(f"{folder}/{path}").status_code in (400, 404, 501)


def test_a_missing_artifact_is_not_found(api: ApiServer, ended: Document) -> None:
    node = first_node(ended)["id"]
    for path in (
        f"/artifacts/argo/ended/{node}/y",
        "/artifacts/argo/ended/nothing/x",
        f"/artifacts/argo/nothing/{node}/x",
        f"/input-artifacts/argo/ended/{node}/x",
        f"/artifacts-by-uid/nothing/{node}/x",
    ):
        assert api.client.get(path).status_code == 404, path


def test_a_succeeded_run_is_found_by_its_uid_after_its_name(api: ApiServer) -> None:
    name = api.submit(make_hello_workflow())
    finished = api.wait(name)
    assert api.get("/workflows/argo/other-name", uid=uid_of(finished)) == finished
