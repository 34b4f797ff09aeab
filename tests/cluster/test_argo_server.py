"""A user's pipeline, submitted to a real Argo server by Hera's `create()`, `argo submit` and
`rekindle submit`.

argo server --namespace argo --auth-mode=client --secure=false &      # in the namespace of Argo's
controller export REKINDLE_TEST_ARGO_SERVER=http://127.0.0.1:2746 .venv/bin/python -m pytest -m
cluster tests/cluster/test_argo_server.py
"""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from rekindle.storage import Store
from tests.cluster import namespace
from tests.cluster.kube import Kube
from tests.commands import BIN
from tests.waiting import until

SERVER = "REKINDLE_TEST_ARGO_SERVER"
S3 = "REKINDLE_TEST_S3"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
NEEDED_VARIABLES = {
    SERVER: "the address of an Argo server with --auth-mode=client",
    **{name: namespace.NEEDED_VARIABLES[name] for name in (S3, *KEYS)},
}
END_PHASES = ("Succeeded", "Failed", "Error")
PIPELINE = '''
"""Two greetings by plain Hera: the second has the output of the first."""

from hera.workflows import Parameter, script
from hera.workflows.models import PodGC

from rekindle import blocks

IMAGE = "{image}"


@script(constructor="inline", image=IMAGE, outputs=[Parameter(name="text", value_from={{"path": "/tmp/text"}})])
def greet(name: str):
    from pathlib import Path

    Path("/tmp/text").write_text(f"hello {{name}}")
    print("greets", name)


@script(constructor="inline", image=IMAGE)
def shout(text: str):
    print(text.upper())


def build(config):
    with blocks.pipeline(config, pod_gc=PodGC()) as workflow:  # the pods stay, with their logs
        first = greet(name="greet", arguments={{"name": config.model.name}})
        first >> shout(name="shout", arguments={{"text": first.get_parameter("text")}})
    return workflow
'''
WORKLOAD = '''
"""A workload for the config, which does not train."""

from rekindle import DataConfig as Data
from rekindle import Metric, Section


class Model(Section):
    name: str = "world"


metrics = (Metric("loss", max),)
prepare = dataset = model = loss = examples = predictor = None
'''
CREATE = """
import os

from hera.workflows import WorkflowsService

from pipelines.greeting import build
from rekindle import load_config

workflow = build(load_config("configs/hello.yaml").config)
workflow.workflows_service = WorkflowsService(host=os.environ["ARGO_URL"], token=os.environ["ARGO_TOKEN"])
workflow.create()
print(workflow.name)
"""
# command lines of a user; {server} stands for the flags that make `argo` use the server instead of
# the Kubernetes API
SUBMIT_COMMANDS = {
    "hera": "python create.py",
    "argo": (
        "rekindle render configs/hello.yaml > hello.yaml; "
        "env -u ARGO_TOKEN argo submit -n {namespace} -o name hello.yaml"
    ),
    "argo by the server": (
        "rekindle render configs/hello.yaml | argo submit -n {namespace} -o name {server}"
        " /dev/stdin"
    ),
    "rekindle by the server": "rekindle submit configs/hello.yaml --argo-server $ARGO_URL --yes",
}
SUBMITTER = [
    {
        "apiGroups": ["argoproj.io"],
        "resources": ["workflows"],
        "verbs": ["create", "get", "list", "watch"],
    }
]


@dataclass(frozen=True)
class Project:
    """A user's project, and the credentials of a service account that may submit workflows."""

    folder: Path
    kube: Kube
    environment: dict[str, str]

    def __call__(self, command: str) -> str:
        """Run a command that must succeed, and return the output of the command."""
        completed = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
        return completed.stdout

    def phase(self, name: str) -> str:
        return ((self.kube.get("workflow", name) or {}).get("status") or {}).get("phase", "")


def platform(kube: Kube) -> list[dict]:
    """Return the namespace and the Secret in the way that users create them, and a service account
    that may submit workflows."""
    flags = [
        "-n",
        kube.namespace,
        "--bucket",
        kube.namespace,
        "--endpoint",
        os.environ[S3],
        "--mlflow",
    ]

    command = [BIN / "rekindle", "platform", "render", *flags, "http://mlflow.example.com"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    version = "rbac.authorization.k8s.io/v1"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "submitter"}
    subject = {"kind": "ServiceAccount", "name": "submitter", "namespace": kube.namespace}
    name = {"metadata": {"name": "submitter"}}

    return [
        *yaml.safe_load_all(rendered),
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "rekindle-s3"},
            "stringData": {name: os.environ[name] for name in KEYS},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", **name},
        {"apiVersion": version, "kind": "Role", **name, "rules": SUBMITTER},
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            **name,
            "roleRef": role,
            "subjects": [subject],
        },
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    missing = [
        f"{name} ({description})"
        for name, description in NEEDED_VARIABLES.items()
        if not os.environ.get(name)
    ]

    assert not missing, f"set {', '.join(missing)}"
    assert shutil.which("argo"), (
        "put the command `argo`, of the version of the cluster's Argo, on the PATH"
    )
    kube = Kube(f"rekindle-argo-{uuid.uuid4().hex[:6]}")
    store = Store(kube.namespace, os.environ[S3], *(os.environ[name] for name in KEYS))
    folder = tmp_path_factory.mktemp("project")

    config = {
        "name": "hello",
        "pipeline": "pipelines.greeting",
        "workload": "steps.greeting",
        "data": {"source": "made://up"},
        "model": {"name": "Ada"},
        "cluster": {"namespace": kube.namespace},
    }

    files = {
        "pipelines/greeting.py": PIPELINE.format(
            image=os.environ.get("REKINDLE_TEST_PYTHON", "python:3.11-slim")
        ),
        "steps/greeting.py": WORKLOAD,
        "configs/hello.yaml": yaml.safe_dump(config),
        "create.py": CREATE,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    url = os.environ[SERVER]
    store.client.create_bucket(Bucket=store.bucket)

    try:
        kube.apply(*platform(kube))
        token = kube("create", "token", "submitter").strip()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield Project(
            folder,
            kube,
            {**os.environ, "PATH": path, "ARGO_URL": url, "ARGO_TOKEN": f"Bearer {token}"},
        )
    finally:
        kube(
            "delete",
            "namespace",
            kube.namespace,
            "--ignore-not-found",
            "--timeout=120s",
            timeout=150,
        )

        store.delete([entry.key for entry in store.list("")])
        store.client.delete_bucket(Bucket=store.bucket)


@pytest.fixture(scope="module")
def submitted(project: Project) -> dict[str, str]:
    """The workflows that were submitted, one in each way to submit; all of them run at the same
    time."""
    url = urlsplit(os.environ[SERVER])
    server = (
        f"--argo-server {url.netloc} --argo-http1"
        f" {'--secure=false' if url.scheme == 'http' else ''}"
    )
    texts = {}
    for way, command in SUBMIT_COMMANDS.items():
        texts[way] = project(command.format(namespace=project.kube.namespace, server=server))
    return {way: text.split()[0] for way, text in texts.items()}


@pytest.mark.parametrize("way", SUBMIT_COMMANDS)
def test_a_user_pipeline_succeeds_with_every_way_to_submit_it(
    project: Project, submitted: dict[str, str], way: str
) -> None:
    name = submitted[way]
    flags = f"-n {project.kube.namespace}"
    until(
        f"{name} to end",
        lambda: project.phase(name) in END_PHASES,
        300,
        evidence=lambda: project.kube("get", "events"),
    )
    shown, logs = (project(f"rekindle {command} {name} {flags}") for command in ("status", "logs"))
    assert project.phase(name) == "Succeeded", shown
    assert name in shown
    assert "greet" in shown
    assert "shout" in shown
    assert "greets Ada" in logs
    assert "HELLO ADA" in logs


def test_the_rendered_manifest_passes_argo_lint(project: Project) -> None:
    output = project(
        "rekindle render configs/hello.yaml > lint.yaml && argo lint --offline lint.yaml"
    )
    assert "no linting errors found" in output
