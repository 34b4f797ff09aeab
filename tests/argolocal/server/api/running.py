"""Start a server of the API in this process, send requests to it, and execute its runs in
threads."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.responses import PlainTextResponse

from argolocal.common import homes
from argolocal.page.access import Access
from argolocal.page.server import listen, read_token
from argolocal.page.sources import LocalRuns
from argolocal.page.tabs.artifact_source import StoredArtifacts
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.server.api.application import WithApi, make_api
from argolocal.server.api.backend import NAMESPACE, Backend
from argolocal.server.api.catalogue import RunCatalogue
from argolocal.server.objects import Objects
from argolocal.server.queue import Queue
from argolocal.state.journal import NotQueued
from tests import builders
from tests.waiting import until

Document = dict[str, Any]
TIMEOUT_S = 60


class RunThread:
    """The process of a run, which is replaced by a thread."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            LocalRun.load(self.name, self.cluster, is_queued=True).run()
        except NotQueued:
            # the process may have ended already
            return

    def has_ended(self) -> bool:
        return not self.thread.is_alive()


class ApiServer:
    """A server of the API for a home (directory of runs). `parallelism`: number of runs at the same
    time; with 0, no run starts."""

    def __init__(self, home: Path, parallelism: int = 4) -> None:
        homes.create_home(home)
        self.home = home
        self.cluster = LocalCluster(home)
        self.parallelism = parallelism
        self.queue = Queue(
            self.cluster, lambda name: RunThread(self.cluster, name), max(1, parallelism)
        )
        self.token = read_token(home)
        self.socket = listen(None)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        store = StoredArtifacts.in_home(home, LocalCluster.bucket).open_store
        run_catalogue = RunCatalogue(LocalRuns(home), NAMESPACE)
        objects = Objects(self.cluster)
        self.backend = Backend(self.cluster, self.queue, objects, run_catalogue, store)
        page = PlainTextResponse("the page")
        application = Access(WithApi(make_api(self.backend), page), self.token, self.port)
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=1)
        )
        self.is_ending = threading.Event()
        self.threads = [
            threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]}),
            threading.Thread(target=self._start_runs),
        ]
        headers = {"Authorization": f"Bearer {self.token}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)

    def _start_runs(self) -> None:
        while not self.is_ending.wait(0.02):
            if self.parallelism:
                self.queue.start_next()

    def start(self) -> None:
        for thread in self.threads:
            thread.start()
        until("the server", lambda: self.uvicorn.started)

    def end(self) -> None:
        self.client.close()
        self.is_ending.set()
        self.uvicorn.should_exit = True
        for thread in self.threads:
            thread.join(30)

    def send(self, method: str, path: str, body: object = None, **options: Any) -> httpx.Response:
        """Send a request with the token to a path below /api/v1."""
        return self.client.request(method, f"/api/v1{path}", json=body, **options)

    def get(self, path: str, **parameters: Any) -> Document:
        """Return the object at a path, which must exist."""
        answer = self.send("GET", path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def change(self, method: str, path: str, body: object = None) -> Document:
        """Send a request that must succeed, and return its answer."""
        answer = self.send(method, path, body if body is not None else {})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, workflow: Document) -> str:
        """Submit a workflow, and return its name."""
        created = self.change("POST", "/workflows/argo", {"workflow": workflow})
        return created["metadata"]["name"]

    def submit_and_wait(self, workflow: Document) -> Document:
        """Submit a workflow, and return it when it has ended."""
        return self.wait(self.submit(workflow))

    def workflow(self, name: str) -> Document:
        return self.get(f"/workflows/argo/{name}")

    def phase(self, name: str) -> str:
        return self.workflow(name)["status"]["phase"]

    def wait(self, name: str, *phases: str) -> Document:
        """Wait until a workflow has one of the phases (default: until it has ended)."""
        expected = phases or ("Succeeded", "Failed", "Error")
        until(f"{name} to be {expected}", lambda: self.phase(name) in expected)
        return self.workflow(name)

    def wait_until_suspended(self, name: str) -> Document:
        """Wait until a step of a workflow is suspended, and return its node."""

        def find() -> Document | None:
            nodes = self.workflow(name)["status"].get("nodes") or {}
            suspended = [
                node
                for node in nodes.values()
                if node["type"] == "Suspend" and node["phase"] == "Running"
            ]
            return suspended[0] if suspended else None

        return until(f"a suspended step of {name}", find)


@contextmanager
def start_api(home: Path, parallelism: int = 4) -> Iterator[ApiServer]:
    """Serve the API of a home, and end the server at the end of the `with` block."""
    server = ApiServer(home, parallelism)
    server.start()
    try:
        yield server
    finally:
        server.end()


def make_step_template(name: str, script: str, **more: Any) -> Document:
    """Return a template that runs a shell script."""
    return {"name": name, "container": builders.make_shell_container(script), **more}


def make_steps_template(*names: str) -> Document:
    """Return a template that runs other templates one after another."""
    return {"name": "main", "steps": [[{"name": name, "template": name}] for name in names]}


def make_api_workflow(*templates: Document, name: str = "", **spec: Any) -> Document:
    """Return a workflow whose name is generated, unless `name` is given."""
    manifest = builders.make_workflow(*templates, **spec)
    manifest["metadata"] = {"name": name} if name else {"generateName": "w-"}
    return manifest


def make_hello_workflow(name: str = "", message: str = "hello") -> Document:
    """Return a workflow that prints its parameter."""
    parameters = {"parameters": [{"name": "message", "value": message}]}
    main_template = make_step_template("main", "echo {{workflow.parameters.message}}")
    return make_api_workflow(main_template, name=name, arguments=parameters)


def make_failing_workflow(name: str = "") -> Document:
    """Return a workflow whose second step fails with the exit code of its parameter."""
    parameters = {"parameters": [{"name": "code", "value": "3"}]}
    first_step = make_step_template(
        "first", "echo x > /tmp/x; echo one", outputs={"artifacts": [ARTIFACT]}
    )
    second_step = make_step_template("second", "echo two; exit {{workflow.parameters.code}}")
    return make_api_workflow(
        make_steps_template("first", "second"),
        first_step,
        second_step,
        name=name,
        arguments=parameters,
    )


ARTIFACT = {"name": "x", "path": "/tmp/x", "archive": {"none": {}}}


def make_gated_workflow(name: str = "", default: str | None = "no") -> Document:
    """Return a workflow that waits for the output `go` of its step `gate`."""
    source: Document = {"supplied": {}}
    if default is not None:
        source["default"] = default
    outputs = {"parameters": [{"name": "go", "valueFrom": source}]}
    gate = {"name": "gate", "suspend": {}, "outputs": outputs}
    return make_api_workflow(
        make_steps_template("gate", "after"),
        gate,
        make_step_template("after", "echo after"),
        name=name,
    )


def make_long_workflow(name: str = "") -> Document:
    """Return a workflow that does not end by itself within the time of a test, with an exit
    handler."""
    main_template = make_step_template("main", "echo begin; sleep 600")
    return make_api_workflow(
        main_template, make_step_template("bye", "echo bye"), name=name, onExit="bye"
    )


def make_stored_template(name: str, kind: str = "WorkflowTemplate") -> Document:
    """Return a stored template of the workflow `hello`."""
    return {
        **make_hello_workflow(),
        "kind": kind,
        "metadata": {"name": name, "labels": {"team": "a"}},
    }


def make_cron_workflow(name: str) -> Document:
    """Return a CronWorkflow that runs once a year."""
    spec = {"schedules": ["0 3 1 1 *"], "workflowSpec": make_hello_workflow()["spec"]}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "CronWorkflow",
        "metadata": {"name": name, "labels": {"team": "a"}},
        "spec": spec,
    }


def describe_error(answer: httpx.Response) -> tuple[int, int, str]:
    """Return the status of an answer, the code of gRPC and the message."""
    error: Mapping[str, Any] = answer.json()
    return answer.status_code, error["code"], error["message"]
