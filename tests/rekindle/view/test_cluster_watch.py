"""The commands for runs on a cluster: output and exit codes of real processes."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import manifest_sha256, render_manifest
from rekindle.cluster import workflows
from tests.rekindle.cli.processes import REKINDLE, run_rekindle
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.cluster.workflows import WORKFLOWS_AT, make_manifest, make_node

GOLDEN = Path(__file__).parents[2] / "golden"


def make_run(phase: str, *nodes: dict[str, Any], verdict: str = "") -> dict[str, Any]:
    outputs = {"parameters": [{"name": "verdict", "value": verdict}]}
    times = {"startedAt": "2026-11-21T20:00:00Z", "finishedAt": "2026-11-21T20:01:00Z"}
    nodes_by_id = {run_node["id"]: run_node for run_node in nodes}
    status = {"phase": phase, "nodes": nodes_by_id, "outputs": outputs, **times}
    labels = {"app.kubernetes.io/part-of": "rekindle"}
    return {
        "kind": "Workflow",
        "metadata": {"name": "demo", "labels": labels},
        "spec": {"entrypoint": "main"},
        "status": status,
    }


@pytest.mark.parametrize(
    ("workflow", "code", "words"),
    [
        (make_run("Succeeded", make_node("demo.a")), 0, "took      1 min 00 s"),
        (make_run("Succeeded", verdict="keep"), 3, "not released"),
        (
            make_run("Failed", make_node("demo.a", phase="Failed", message="exit code 1")),
            1,
            "resume  rekindle resume demo --cluster",
        ),
        (
            workflows.compress_nodes(
                make_run("Failed", make_node("demo.a", phase="Failed", message="m"))
            ),
            1,
            "step    a",
        ),
    ],
)
def test_a_watch_ends_like_a_local_run(
    server: ApiServer, tmp_path: Path, workflow: Any, code: int, words: str
):
    server.put(WORKFLOWS_AT, workflow)
    result = run_rekindle("status", "demo", "--cluster", "--watch", cwd=tmp_path)
    assert result.returncode == code
    assert words in result.stdout + result.stderr


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("token", [True, False])
def test_the_request_to_try_has_the_token_if_the_servers_need_one(
    server: ApiServer, tmp_path: Path, token: bool
):
    config = load_config(
        GOLDEN / "config.yaml", sets=[f"serve.token={str(token).lower()}"], environment={}
    ).config
    workflow = make_run("Succeeded")
    workflow["metadata"]["labels"]["app.kubernetes.io/name"] = "cards"
    server.put(WORKFLOWS_AT, workflow | {"spec": render_manifest(config)["spec"]})
    service = {"metadata": {"name": "cards"}, "spec": {"ports": [{"port": 9000}]}}
    server.put("/api/v1/namespaces/models/services", service)
    result = run_rekindle("status", "demo", "--cluster", "--watch", cwd=tmp_path)

    if token:
        request = "printf 'Authorization: Bearer %s' \"$REKINDLE_TOKEN\" | curl -s -H @-"
    else:
        request = "curl -s"

    assert f"svc/cards 9000 & {request} localhost:9000/v1/models/cards/example" in result.stdout


def test_ctrl_c_ends_only_the_watch_and_shows_how_to_continue_it(server: ApiServer, tmp_path: Path):
    server.put(WORKFLOWS_AT, make_run("Running", make_node("demo.a", phase="Running")))
    process = subprocess.Popen(
        [REKINDLE, "status", "demo", "--cluster", "--watch"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    assert process.stdout
    assert "demo running" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "rekindle status demo --watch --cluster" in output
    assert "Traceback" not in output
    assert {method for method, *_ in server.requests} == {"GET"}


@pytest.mark.slow
def test_a_watch_reports_a_job_whose_pods_fit_no_node(server: ApiServer, tmp_path: Path):
    job = make_node("demo.train", phase="Running", displayName="train", templateName="apply")
    server.put(WORKFLOWS_AT, make_run("Running", job))

    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient cpu.",
    }

    process = subprocess.Popen(
        [REKINDLE, "status", "demo", "--cluster", "--watch"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    assert process.stdout
    assert [process.stdout.readline()[9:] for _ in range(2)] == [
        "demo running\n",
        "train running\n",
    ]

    server.put(
        WORKFLOWS_AT.replace("apis/argoproj.io/v1alpha1", "api/v1").replace("workflows", "pods"),
        {
            "metadata": {
                "name": "demo-train-worker-0",
                "labels": {"workflows.argoproj.io/workflow": "demo"},
            },
            "status": {"phase": "Pending", "conditions": [condition]},
        },
    )

    assert process.stdout.readline()[9:] == "train is waiting: Unschedulable: Insufficient cpu.\n"
    table = run_rekindle("status", "demo", "--cluster", cwd=tmp_path).stdout
    assert "demo: Pending" in table
    assert "Insufficient cpu" in table

    assert (
        json.loads(run_rekindle("status", "--cluster", "-o", "json", cwd=tmp_path).stdout)["runs"][
            0
        ]["phase"]
        == "Pending"
    )

    server.put(WORKFLOWS_AT, make_run("Succeeded", {**job, "phase": "Succeeded"}))
    assert process.wait(timeout=60) == 0


def write_manifest(folder: Path, **spec: Any) -> str:
    (folder / "w.yaml").write_text(json.dumps(make_manifest(**spec)))
    return str(folder / "w.yaml")


SPEC = {
    "templates": [{"name": "main", "container": {"image": "a:1", "command": ["true"]}}],
    "arguments": {"parameters": [{"name": "n", "value": "1"}]},
}


def test_a_dry_run_prints_the_submitted_workflow(server: ApiServer, tmp_path: Path):
    file = write_manifest(tmp_path, **SPEC)
    printed = json.loads(
        run_rekindle("submit", "--manifest", file, "--dry-run", "-o", "json", cwd=tmp_path).stdout
    )
    assert [request for request in server.requests if request[0] != "GET"] == []
    completed = run_rekindle(
        "submit", "--manifest", file, "-n", "models", "-o", "json", cwd=tmp_path
    )
    ((_, path, sent_body),) = [request for request in server.requests if request[0] == "POST"]
    assert path == WORKFLOWS_AT

    for rendered in (printed, sent_body):
        assert rendered["metadata"].pop("name").startswith("demo-")
        assert rendered["metadata"]["annotations"].pop(workflows.SUBMISSION_ANNOTATION)

    assert printed["metadata"].pop("namespace") == "ours"
    assert sent_body["metadata"].pop("namespace") == "models"
    assert printed == sent_body
    result = json.loads(completed.stdout)
    assert result["manifest_sha256"] == manifest_sha256(make_manifest(**SPEC))
    assert result["phase"] == "Pending"


def test_a_duplicate_run_is_submitted_only_with_the_option_yes(server: ApiServer, tmp_path: Path):
    command = ("submit", "--manifest", write_manifest(tmp_path, **SPEC), "-n", "models")
    assert run_rekindle(*command, cwd=tmp_path).returncode == 0
    (name,) = server.objects[WORKFLOWS_AT]
    refused = run_rekindle(*command, "-o", "json", cwd=tmp_path)
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["workflow"] is None
    assert f"{name} is already running with the same manifest and parameters" in refused.stderr
    assert run_rekindle(*command, "-p", "n=2", cwd=tmp_path).returncode == 0
    assert run_rekindle(*command, "--yes", cwd=tmp_path).returncode == 0
    assert len(server.objects[WORKFLOWS_AT]) == 3


def test_an_invalid_workflow_is_not_submitted(server: ApiServer, tmp_path: Path):
    file = write_manifest(tmp_path, **{**SPEC, "entrypoint": "mian"})
    result = run_rekindle("submit", "--manifest", file, cwd=tmp_path)
    assert result.returncode == 2
    assert "mian" in result.stderr
    assert server.requests == []


def test_a_workflow_is_sent_unchanged_to_an_argo_server_with_argo_token(
    server: ApiServer, tmp_path: Path
):
    url_path = "/argo/api/v1/workflows/models"
    server.refuse("POST", url_path, 200, {"metadata": {"name": "x"}, "spec": {}})
    server.refuse("GET", url_path, 200, {"metadata": {}, "items": None})
    url = f"http://127.0.0.1:{server.port}/argo"

    command = (
        "submit",
        "--manifest",
        write_manifest(tmp_path, **SPEC, pendingTimeout="1h"),
        "-n",
        "models",
    )

    result = run_rekindle(
        *command, cwd=tmp_path, ARGO_SERVER=url, ARGO_TOKEN="Bearer of argo", KUBECONFIG="/none"
    )
    assert result.returncode == 0, result.stderr
    ((_, path, sent),) = [request for request in server.requests if request[0] == "POST"]
    assert path == url_path
    assert server.tokens == {"Bearer of argo"}
    # Hera's models do not know this field
    assert sent["workflow"]["spec"]["pendingTimeout"] == "1h"
    away = run_rekindle(
        *command, "--argo-server", "http://127.0.0.1:9", cwd=tmp_path, KUBECONFIG="/none"
    )
    assert away.returncode == 1
    assert "does not answer" in away.stderr


@pytest.mark.slow
def test_suspending_a_schedule_changes_nothing_else(server: ApiServer, tmp_path: Path):
    command = ("schedule", str(GOLDEN / "config.yaml"), "-o", "json")
    assert run_rekindle(*command, cwd=tmp_path).returncode == 0
    for flag, change in (("--suspend", "nothing → true"), ("--unsuspend", "true → nothing")):
        changes = json.loads(run_rekindle(*command, flag, cwd=tmp_path).stdout)["changes"]
        assert [line.rpartition(" ")[2] for line in changes[:2]] == [
            "unchanged",
            "updated",
        ], changes
        assert changes[2:] == [f"  spec.suspend: {change}"]


def test_status_of_a_namespace_lists_runs_and_schedules(server: ApiServer, tmp_path: Path):
    assert "no runs in" in run_rekindle("status", "--cluster", cwd=tmp_path).stdout
    server.put(WORKFLOWS_AT, make_run("Succeeded", verdict="release"))
    cron = {"metadata": {"name": "cards"}, "spec": {"schedules": ["0 3 * * 1"], "suspend": True}}
    server.put(WORKFLOWS_AT.replace("workflows", "cronworkflows"), cron)
    tables = json.loads(run_rekindle("status", "--cluster", "-o", "json", cwd=tmp_path).stdout)
    assert [(row["run"], row["phase"], row["verdict"]) for row in tables["runs"]] == [
        ("demo", "Succeeded", "release")
    ]
    assert [(row["schedule"], row["at"], row["suspended"]) for row in tables["schedules"]] == [
        ("cards", "0 3 * * 1", True)
    ]


def test_the_status_of_a_run_has_its_endpoint_and_manifest_hash(server: ApiServer, tmp_path: Path):
    workflow = make_run("Succeeded", verdict="release")
    workflow["metadata"]["labels"]["app.kubernetes.io/name"] = "cards"
    server.put(WORKFLOWS_AT, workflow)
    service = {"metadata": {"name": "cards"}, "spec": {"ports": [{"port": 8080}]}}
    server.put("/api/v1/namespaces/models/services", service)
    status = json.loads(
        run_rekindle("status", "demo", "--cluster", "-o", "json", cwd=tmp_path).stdout
    )
    assert status["endpoint"] == "http://cards.models:8080"
    assert "manifest_sha256" in status


def test_deleting_an_active_run_needs_the_option_yes(server: ApiServer, tmp_path: Path):
    server.put(WORKFLOWS_AT, make_run("Running"))
    refused = run_rekindle("delete", "demo", cwd=tmp_path)
    assert refused.returncode == 2
    assert "rekindle stop demo --cluster" in refused.stderr
    assert run_rekindle("delete", "demo", "--yes", "-o", "json", cwd=tmp_path).returncode == 0
    assert server.objects[WORKFLOWS_AT] == {}
