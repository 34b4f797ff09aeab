"""Tests of the changes of workflows by the API of an Argo server. An approval, a stop or a retry
has the effect that the user asked for, exactly once."""

from pathlib import Path

import pytest

from argolocal.runner.run import LocalRun
from tests.argolocal.server.api.running import (
    ApiServer,
    Document,
    describe_error,
    make_api_workflow,
    make_failing_workflow,
    make_gated_workflow,
    make_hello_workflow,
    make_long_workflow,
    make_step_template,
    make_steps_template,
    start_api,
)


def put_action(api: ApiServer, name: str, action: str, **body: object) -> Document:
    return api.change("PUT", f"/workflows/argo/{name}/{action}", body)


def request_refused_action(
    api: ApiServer, name: str, action: str, **body: object
) -> tuple[int, int, str]:
    return describe_error(api.send("PUT", f"/workflows/argo/{name}/{action}", body))


def nodes_by_name(document: Document) -> dict[str, Document]:
    return {node["displayName"]: node for node in document["status"]["nodes"].values()}


@pytest.mark.parametrize(("action", "strategy"), [("stop", "Stop"), ("terminate", "Terminate")])
def test_only_stop_runs_the_exit_handler(api: ApiServer, action: str, strategy: str) -> None:
    name = api.submit(make_long_workflow())
    api.wait(name, "Running")
    changed = put_action(api, name, action)
    assert changed["spec"]["shutdown"] == strategy

    ended = api.wait(name)
    assert ended["status"]["phase"] == "Failed"
    assert ended["status"]["message"] == f"Stopped with strategy '{strategy}'"
    assert (f"{name}.onExit" in nodes_by_name(ended)) == (action == "stop")
    status, code, message = request_refused_action(api, name, action)
    assert (status, code) == (500, 13)
    assert "cannot shutdown a completed workflow" in message


def test_a_resumed_step_gets_its_default(api: ApiServer) -> None:
    name = api.submit(make_gated_workflow())
    api.wait_until_suspended(name)
    put_action(api, name, "resume")
    gate = nodes_by_name(api.wait(name))["gate"]
    assert gate["outputs"]["parameters"] == [{"name": "go", "value": "no"}]


def test_a_step_without_a_value_is_not_resumed(api: ApiServer) -> None:
    name = api.submit(make_gated_workflow(default=None))
    node = api.wait_until_suspended(name)
    status, code, message = request_refused_action(api, name, "resume")
    assert (status, code) == (500, 13)
    assert "has not been set" in message

    selector = f"id={node['id']}"
    put_action(api, name, "set", nodeFieldSelector=selector, outputParameters='{"go": "yes"}')
    put_action(api, name, "resume", nodeFieldSelector=selector)
    gate = nodes_by_name(api.wait(name))["gate"]
    assert gate["outputs"]["parameters"] == [{"name": "go", "value": "yes"}]


def test_a_step_can_be_failed_with_a_message(api: ApiServer) -> None:
    name = api.submit(make_gated_workflow())
    api.wait_until_suspended(name)
    put_action(api, name, "stop", nodeFieldSelector="displayName=gate", message="rejected")
    ended = api.wait(name)
    assert ended["status"]["phase"] == "Failed"
    assert nodes_by_name(ended)["gate"]["message"] == "rejected"


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({}, 13, "use a node field selector"),
        ({"nodeFieldSelector": "displayName=x", "phase": "Failed"}, 13, "no suspend nodes"),
        ({"nodeFieldSelector": "displayName", "phase": "Failed"}, 13, "can't understand"),
        ({"nodeFieldSelector": "displayName=gate", "phase": "Done"}, 3, "invalid phase"),
        (
            {"nodeFieldSelector": "displayName=gate", "outputParameters": '{"x": "1"}'},
            13,
            "not expecting output parameter 'x'",
        ),
        ({"nodeFieldSelector": "displayName=gate", "outputParameters": "{"}, 3, "parse"),
    ],
)
def test_a_wrong_change_of_a_step_is_refused(
    waiting: tuple[ApiServer, str], body: Document, code: int, message: str
) -> None:
    server, name = waiting
    answer = request_refused_action(server, name, "set", **body)
    assert answer[1] == code
    assert message in answer[2]


@pytest.fixture(scope="module")
def waiting(api: ApiServer) -> tuple[ApiServer, str]:
    """A workflow with a suspended step."""
    name = api.submit(make_gated_workflow())
    api.wait_until_suspended(name)
    return api, name


def test_a_suspended_workflow_starts_no_step(tmp_path: Path) -> None:
    with start_api(tmp_path / "home", parallelism=0) as server:
        name = server.submit(make_hello_workflow())
        assert server.phase(name) == "Pending"
        assert put_action(server, name, "suspend")["spec"]["suspend"] is True

        server.parallelism = 1
        server.wait(name, "Running")
        assert "nodes" not in server.workflow(name)["status"]
        assert "suspend" not in put_action(server, name, "resume")["spec"]
        assert server.wait(name)["status"]["phase"] == "Succeeded"
        status, code, message = request_refused_action(server, name, "suspend")
        assert (status, code, message) == (
            500,
            13,
            "timed out waiting for the condition: cannot suspend completed workflows",
        )


def test_a_stopped_workflow_does_not_wait_for_a_place_in_the_queue(tmp_path: Path) -> None:
    with start_api(tmp_path / "home", parallelism=1) as server:
        first_name = server.submit(make_long_workflow())
        server.wait(first_name, "Running")
        second_name = server.submit(make_long_workflow())
        put_action(server, second_name, "terminate")
        assert server.wait(second_name)["status"]["phase"] == "Failed"
        put_action(server, first_name, "terminate")
        server.wait(first_name)


def test_a_retried_workflow_repeats_only_what_failed(api: ApiServer) -> None:
    name = api.submit(make_failing_workflow())
    failed = api.wait(name)
    assert failed["status"]["phase"] == "Failed"
    started = nodes_by_name(failed)["first"]["startedAt"]

    put_action(api, name, "retry", parameters=["code=0"])
    retried = api.wait(name)
    assert retried["status"]["phase"] == "Succeeded"
    assert nodes_by_name(retried)["first"]["startedAt"] == started
    assert retried["spec"]["arguments"]["parameters"] == [{"name": "code", "value": "0"}]


def test_steps_that_succeeded_can_be_restarted(api: ApiServer) -> None:
    name = api.submit(
        make_api_workflow(
            make_steps_template("one", "two"),
            make_step_template("one", "true"),
            make_step_template("two", "true"),
        )
    )
    earlier_nodes = nodes_by_name(api.wait(name))
    status, code, message = request_refused_action(api, name, "retry")
    assert (status, code) == (400, 3)
    assert "restartSuccessful" in message

    put_action(api, name, "retry", restartSuccessful=True, nodeFieldSelector="displayName=two")
    restarted_run = api.wait(name)
    assert restarted_run["status"]["phase"] == "Succeeded"
    assert nodes_by_name(restarted_run)["one"] == earlier_nodes["one"]
    assert set(nodes_by_name(restarted_run)) == set(earlier_nodes)


def test_a_workflow_in_progress_cannot_be_retried(waiting: tuple[ApiServer, str]) -> None:
    server, name = waiting
    assert request_refused_action(server, name, "retry") == (
        400,
        3,
        "Cannot retry a workflow in phase Running",
    )


def test_a_resubmitted_workflow_is_a_copy_with_the_name_of_its_origin(api: ApiServer) -> None:
    manifest = make_hello_workflow("origin")
    manifest["metadata"]["labels"] = {"team": "a"}
    api.submit(manifest)
    api.wait("origin")
    copied = put_action(api, "origin", "resubmit", parameters=["message=changed"])
    finished = api.wait(copied["metadata"]["name"])
    assert finished["metadata"]["name"].startswith("origin-")
    labels = finished["metadata"]["labels"]
    assert labels["team"] == "a"
    assert labels["workflows.argoproj.io/resubmitted-from-workflow"] == "origin"
    assert finished["spec"]["arguments"]["parameters"][0]["value"] == "changed"


def test_a_memoized_copy_reuses_the_steps_that_succeeded(api: ApiServer) -> None:
    name = api.submit(make_failing_workflow())
    first_node = nodes_by_name(api.wait(name))["first"]
    copied = put_action(api, name, "resubmit", memoized=True, parameters=["code=0"])
    finished = api.wait(copied["metadata"]["name"])
    assert finished["status"]["phase"] == "Succeeded"
    reused = nodes_by_name(finished)["first"]
    assert reused["type"] == "Skipped"
    assert reused["message"] == f"original pod: {first_node['id']}"
    assert reused["outputs"]["artifacts"] == first_node["outputs"]["artifacts"]

    status, code, _ = request_refused_action(
        api, finished["metadata"]["name"], "resubmit", memoized=True
    )
    assert (status, code) == (400, 3)


def test_a_run_that_was_interrupted_has_ended_and_can_be_retried(tmp_path: Path) -> None:
    with start_api(tmp_path / "home", parallelism=0) as server:
        run = LocalRun.create(make_hello_workflow("interrupted"), None, server.cluster)
        run.files.append({"status": {"phase": "Running", "startedAt": "2026-01-01T00:00:00Z"}})
        run.files.close()
        status = server.workflow("interrupted")["status"]
        assert status["phase"] == "Error"
        assert "retry it" in status["message"]
        assert status["finishedAt"]
        labels = {"listOptions.labelSelector": "workflows.argoproj.io/completed=true"}
        assert server.get("/workflows/argo", **labels)["items"]

        put_action(server, "interrupted", "retry")
        assert server.phase("interrupted") == "Running"
        server.parallelism = 1
        assert server.wait("interrupted")["status"]["phase"] == "Succeeded"
