"""Send calls to the API of an Argo server, and record the answers. The answers to these calls were
recorded on a real Argo server, and `test_recorded_calls` compares the answers of `argolocal server`
with them field by field.

    kubectl -n argo create rolebinding ...                 # rights of executors, see below
    argo server --auth-mode server --secure=false &        # Argo 4.0.7, namespace argo
    python -m tests.argolocal.server.api.recorded_calls http://127.0.0.1:2746 --image python:3.11

To record the calls, the service account `default` of the namespace needs the rights to create and
patch workflowtaskresults. The command of this module writes `recorded_calls.json`.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.argolocal.server.api.running import (
    Document,
    make_api_workflow,
    make_cron_workflow,
    make_gated_workflow,
    make_hello_workflow,
    make_step_template,
    make_steps_template,
    make_stored_template,
)
from tests.waiting import until

FILE = Path(__file__).with_name("recorded_calls.json")
IMAGE = "busybox"
WAIT_TIMEOUT_S = 300.0
END_PHASES = ("Succeeded", "Failed", "Error")

# values that differ from server to server, and from run to run
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
VERSION_FIELDS = {"resourceVersion", "generation"}


class Send(Protocol):
    """Sends a request to a path below /api/v1, and returns the answer."""

    def __call__(
        self, method: str, path: str, body: object = None, **options: Any
    ) -> httpx.Response: ...


class Calls:
    """Sends calls one after another, and collects their answers by title."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.answers: dict[str, Document] = {}

    def call(
        self, title: str, method: str, path: str, body: object = None, **parameters: str
    ) -> Document:
        """Send a request, record its answer, and return the object in the answer."""
        if method in ("POST", "PUT") and body is None:
            body = {}
        answer = self.send(method, path, body, params=parameters)
        assert title not in self.answers, title
        self.answers[title] = {
            "status": answer.status_code,
            "body": normalize_answer(answer.json()),
        }
        return answer.json()

    def submit(self, manifest: Document) -> None:
        """Submit a workflow that must be accepted, without recording the answer."""
        answer = self.send("POST", "/workflows/argo", {"workflow": manifest})
        assert answer.status_code == 200, answer.text

    def wait(self, name: str, is_reached: Callable[[Document], bool]) -> None:
        """Wait until a workflow has a given state."""

        def look() -> bool:
            return is_reached(self.send("GET", f"/workflows/argo/{name}").json())

        until(f"a state of {name}", look, WAIT_TIMEOUT_S)

    def wait_for_end(self, *names: str) -> None:
        for name in names:
            self.wait(name, has_ended)

    def wait_for_suspension(self, name: str) -> None:
        self.wait(name, has_suspended_node)


def has_ended(workflow: Document) -> bool:
    """Return True if a workflow has ended, and Argo's controller has set the label about its
    end."""
    labels = workflow["metadata"].get("labels") or {}
    is_labelled = labels.get("workflows.argoproj.io/completed") == "true"
    return workflow.get("status", {}).get("phase") in END_PHASES and is_labelled


def has_suspended_node(workflow: Document) -> bool:
    nodes = (workflow.get("status", {}).get("nodes") or {}).values()
    return any(node["type"] == "Suspend" and node["phase"] == "Running" for node in nodes)


def normalize_answer(value: Any, field: str = "") -> Any:
    """Return an answer with placeholders for times, uids and versions of objects."""
    if isinstance(value, dict):
        return {name: normalize_answer(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [normalize_answer(item) for item in value]
    if field in VERSION_FIELDS:
        return "VERSION"
    if isinstance(value, str):
        return UID.sub("UID", TIME.sub("TIME", value))
    return value


def flatten_answer(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field that is not empty, because Go leaves out empty
    fields."""
    if isinstance(value, dict):
        for name, item in sorted(value.items()):
            yield from flatten_answer(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from flatten_answer(item, f"{path}[{index}]")
    elif value not in (None, "", 0, False):
        yield path, value


def call_all(calls: Calls) -> None:
    """Send all calls, and return their answers. The names of the objects that the calls create
    begin with `rec-`."""
    call_invalid(calls)
    call_stored_objects(calls)
    call_ended_workflows(calls)
    call_suspended_workflows(calls)
    call_actions(calls)
    call_lists(calls)
    call_submissions(calls)
    call_deletions(calls)


def call_invalid(calls: Calls) -> None:
    """Send requests for objects that do not exist, and requests with invalid objects."""
    for kind in ("workflows", "workflow-templates", "cron-workflows"):
        calls.call(f"get missing {kind}", "GET", f"/{kind}/argo/rec-missing")
        calls.call(f"delete missing {kind}", "DELETE", f"/{kind}/argo/rec-missing")
    calls.call("get missing cluster template", "GET", "/cluster-workflow-templates/rec-missing")
    for action in ("stop", "terminate", "suspend", "resume", "retry", "resubmit"):
        path = f"/workflows/argo/rec-missing/{action}"
        calls.call(f"{action} missing", "PUT", path, {"name": "rec-missing", "namespace": "argo"})

    without_entrypoint = make_hello_workflow("rec-invalid")
    del without_entrypoint["spec"]["entrypoint"]
    calls.call(
        "create without entrypoint", "POST", "/workflows/argo", {"workflow": without_entrypoint}
    )
    unknown_template = make_api_workflow(
        {"name": "main", "steps": [[{"name": "a", "template": "nothing"}]]}, name="rec-invalid"
    )
    calls.call("create unknown template", "POST", "/workflows/argo", {"workflow": unknown_template})
    unknown_tag = make_api_workflow(
        make_step_template("main", "echo {{inputs.parameters.x}}"), name="rec-invalid"
    )
    calls.call("lint unknown tag", "POST", "/workflows/argo/lint", {"workflow": unknown_tag})
    calls.call(
        "lint valid",
        "POST",
        "/workflows/argo/lint",
        {"workflow": make_hello_workflow("rec-linted")},
    )
    calls.call("create without body", "POST", "/workflows/argo", {})
    calls.call(
        "submit unknown kind",
        "POST",
        "/workflows/argo/submit",
        {"resourceKind": "Pod", "resourceName": "x", "namespace": "argo", "submitOptions": {}},
    )
    calls.call(
        "submit missing template",
        "POST",
        "/workflows/argo/submit",
        {
            "resourceKind": "WorkflowTemplate",
            "resourceName": "rec-missing",
            "namespace": "argo",
            "submitOptions": {},
        },
    )


def call_stored_objects(calls: Calls) -> None:
    """Create, read, change and delete templates and schedules."""
    kinds: list[tuple[str, str, Document]] = [
        ("/workflow-templates/argo", "template", make_stored_template("rec-stored")),
        (
            "/cluster-workflow-templates",
            "template",
            make_stored_template("rec-stored", "ClusterWorkflowTemplate"),
        ),
        ("/cron-workflows/argo", "cronWorkflow", make_cron_workflow("rec-stored")),
    ]
    for folder, field, example in kinds:
        kind = example["kind"]
        calls.call(f"create {kind}", "POST", folder, {field: example})
        calls.call(f"create {kind} twice", "POST", folder, {field: example})
        found = calls.call(f"get {kind}", "GET", f"{folder}/rec-stored")
        found["metadata"]["labels"] = {"team": "b"}
        calls.call(f"update {kind}", "PUT", f"{folder}/rec-stored", {field: found})
        calls.call(f"update old {kind}", "PUT", f"{folder}/rec-stored", {field: found})
        selector = {"listOptions.labelSelector": "team=b"}
        calls.call(f"list {kind}", "GET", folder, **selector)
        calls.call(f"lint {kind}", "POST", f"{folder}/lint", {field: example})
    for action in ("suspend", "resume"):
        calls.call(
            f"{action} CronWorkflow",
            "PUT",
            f"/cron-workflows/argo/rec-stored/{action}",
            {"name": "rec-stored", "namespace": "argo"},
        )
    for folder, _, example in kinds:
        calls.call(f"delete {example['kind']}", "DELETE", f"{folder}/rec-stored")


def call_ended_workflows(calls: Calls) -> None:
    """Read the objects of workflows that have ended."""
    calls.submit(template_workflow("rec-steps"))
    calls.submit(make_failing_workflow("rec-failing"))
    calls.submit(make_hello_workflow("rec-hello"))
    calls.submit(make_dag_workflow("rec-dag"))
    calls.call(
        "create again", "POST", "/workflows/argo", {"workflow": make_hello_workflow("rec-hello")}
    )
    calls.wait_for_end("rec-hello", "rec-failing", "rec-steps", "rec-dag")
    for name in ("rec-hello", "rec-failing", "rec-steps", "rec-dag"):
        calls.call(f"get {name}", "GET", f"/workflows/argo/{name}")
    fields = "metadata.name,spec.entrypoint,status.phase"
    calls.call("get fields", "GET", "/workflows/argo/rec-hello", fields=fields)
    calls.call("get without nodes", "GET", "/workflows/argo/rec-hello", fields="-status,spec")


def template_workflow(name: str) -> Document:
    """Return a workflow with outputs, a loop, a condition and an exit handler."""
    output = {"name": "text", "valueFrom": {"path": "/tmp/text"}}
    return make_api_workflow(
        {
            "name": "main",
            "steps": [
                [{"name": "make", "template": "make"}],
                [
                    {
                        "name": "use",
                        "template": "use",
                        "arguments": {
                            "parameters": [
                                {
                                    "name": "text",
                                    "value": "{{steps.make.outputs.parameters.text}}-{{item}}",
                                }
                            ]
                        },
                        "withItems": ["a", "b"],
                    },
                    {"name": "never", "template": "make", "when": "1 == 2"},
                ],
            ],
        },
        make_step_template("make", "echo made > /tmp/text", outputs={"parameters": [output]}),
        make_step_template(
            "use",
            "echo {{inputs.parameters.text}}",
            inputs={"parameters": [{"name": "text"}]},
        ),
        make_step_template("bye", "echo {{workflow.status}}"),
        name=name,
        onExit="bye",
    )


def make_failing_workflow(name: str) -> Document:
    """Return a workflow whose second step fails with the exit code of its parameter."""
    return make_api_workflow(
        make_steps_template("first", "second"),
        make_step_template("first", "echo one"),
        make_step_template("second", "exit {{workflow.parameters.code}}"),
        name=name,
        arguments={"parameters": [{"name": "code", "value": "3"}]},
    )


def make_dag_workflow(name: str) -> Document:
    """Return a workflow of tasks, one of which fails, without preventing the next task."""
    tasks = [
        {"name": "a", "template": "works"},
        {"name": "b", "template": "fails", "depends": "a"},
        {"name": "c", "template": "works", "depends": "b.Failed"},
        {"name": "d", "template": "works", "depends": "b.Succeeded"},
    ]
    return make_api_workflow(
        {"name": "main", "dag": {"tasks": tasks}},
        make_step_template("works", "true"),
        make_step_template("fails", "exit 3"),
        name=name,
    )


def call_suspended_workflows(calls: Calls) -> None:
    """Set and resume suspended steps, and suspend a whole workflow."""
    for name in ("rec-gate-set", "rec-gate-resume", "rec-gate-stop", "rec-gate-end"):
        calls.submit(make_gated_workflow(name))
    for name in ("rec-gate-set", "rec-gate-resume", "rec-gate-stop", "rec-gate-end"):
        calls.wait_for_suspension(name)

    action = {"name": "rec-gate-set", "namespace": "argo"}
    calls.call(
        "set unknown output",
        "PUT",
        "/workflows/argo/rec-gate-set/set",
        {
            **action,
            "nodeFieldSelector": "displayName=gate",
            "outputParameters": '{"other": "x"}',
        },
    )
    calls.call(
        "set no node",
        "PUT",
        "/workflows/argo/rec-gate-set/set",
        {**action, "nodeFieldSelector": "displayName=nothing", "message": "x"},
    )
    calls.call("suspend", "PUT", "/workflows/argo/rec-gate-resume/suspend", {})
    calls.call("resume", "PUT", "/workflows/argo/rec-gate-resume/resume", {})
    calls.call("stop", "PUT", "/workflows/argo/rec-gate-stop/stop", {"message": "enough"})
    calls.call("terminate", "PUT", "/workflows/argo/rec-gate-end/terminate", {})
    names = ("rec-gate-resume", "rec-gate-stop", "rec-gate-end")
    calls.wait_for_end(*names)
    for name in names:
        calls.call(f"get {name}", "GET", f"/workflows/argo/{name}")

    failed = {"nodeFieldSelector": "displayName=gate", "phase": "Failed", "message": "not today"}
    calls.call("set phase", "PUT", "/workflows/argo/rec-gate-set/set", {**action, **failed})
    calls.wait_for_end("rec-gate-set")
    calls.call("get rec-gate-set", "GET", "/workflows/argo/rec-gate-set")


def call_actions(calls: Calls) -> None:
    """Perform actions on workflows that have ended."""
    for action in ("stop", "terminate", "suspend", "resume", "retry"):
        calls.call(f"{action} ended", "PUT", f"/workflows/argo/rec-hello/{action}", {})
    calls.call(
        "resubmit memoized ended", "PUT", "/workflows/argo/rec-hello/resubmit", {"memoized": True}
    )
    parameters = {"parameters": ["code=0"]}
    calls.call("retry with parameters", "PUT", "/workflows/argo/rec-failing/retry", parameters)
    calls.wait(
        "rec-failing",
        lambda found: has_ended(found) and found["status"]["phase"] == "Succeeded",
    )
    calls.call("get retried", "GET", "/workflows/argo/rec-failing")
    calls.call(
        "resubmit with a malformed parameter",
        "PUT",
        "/workflows/argo/rec-hello/resubmit",
        {"parameters": ["no-equals-sign"]},
    )


def call_lists(calls: Calls) -> None:
    """List workflows with selectors, fields and pages."""
    fields = "items.metadata.name,items.status.phase"
    for title, options in (
        ("by name", {"listOptions.fieldSelector": "metadata.name=rec-hello"}),
        (
            "by label",
            {"listOptions.labelSelector": "workflows.argoproj.io/phase=Succeeded"},
        ),
        (
            "by absent label",
            {"listOptions.labelSelector": "!workflows.argoproj.io/completed"},
        ),
        ("bad selector", {"listOptions.labelSelector": "a==b=c"}),
        ("bad continue", {"listOptions.limit": "2", "listOptions.continue": "nonsense"}),
        ("prefix", {"nameFilter": "Prefix", "listOptions.fieldSelector": "metadata.name=rec-gate"}),
    ):
        calls.call(f"list {title}", "GET", "/workflows/argo", fields=fields, **options)


def call_submissions(calls: Calls) -> None:
    """Submit workflows from stored objects."""
    calls.send("POST", "/workflow-templates/argo", {"template": make_stored_template("rec-base")})
    calls.send("POST", "/cron-workflows/argo", {"cronWorkflow": make_cron_workflow("rec-cron")})
    body = {"resourceName": "rec-base", "namespace": "argo", "resourceKind": "WorkflowTemplate"}
    call_options = {
        "name": "rec-from-template",
        "parameters": ["message=other"],
        "labels": "team=c",
        "annotations": "a=b",
        "entryPoint": "main",
    }
    calls.call(
        "submit a template",
        "POST",
        "/workflows/argo/submit",
        {**body, "submitOptions": call_options},
    )
    body = {"resourceName": "rec-cron", "namespace": "argo", "resourceKind": "CronWorkflow"}
    calls.call(
        "submit a schedule",
        "POST",
        "/workflows/argo/submit",
        {**body, "submitOptions": {"name": "rec-from-cron"}},
    )
    calls.wait_for_end("rec-from-template", "rec-from-cron")
    calls.call("get a template's workflow", "GET", "/workflows/argo/rec-from-template")
    calls.call("get a schedule's workflow", "GET", "/workflows/argo/rec-from-cron")


def call_deletions(calls: Calls) -> None:
    """Delete objects, and read the deleted objects."""
    calls.call("delete", "DELETE", "/workflows/argo/rec-hello")
    calls.call("delete again", "DELETE", "/workflows/argo/rec-hello")
    calls.call("get deleted", "GET", "/workflows/argo/rec-hello")


def replace_images(document: Any, old: str, new: str) -> Any:
    """Return a document with another image in its containers."""
    if isinstance(document, dict):
        return {
            name: new if name == "image" and value == old else replace_images(value, old, new)
            for name, value in document.items()
        }
    if isinstance(document, list):
        return [replace_images(item, old, new) for item in document]
    return document


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("url", help="address of the Argo server")
    command.add_argument("--image", default=IMAGE, help="image with a shell on that cluster")
    options = command.parse_args()
    client = httpx.Client(base_url=f"{options.url}/api/v1", timeout=60, verify=False)

    def send(method: str, path: str, body: object = None, **more: Any) -> httpx.Response:
        body = replace_images(body, IMAGE, options.image)
        return client.request(method, path, json=body, **more)

    calls = Calls(send)
    try:
        call_all(calls)
    finally:
        answers = replace_images(calls.answers, options.image, IMAGE)
        FILE.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
