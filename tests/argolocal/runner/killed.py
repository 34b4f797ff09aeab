"""Run a workflow whose runner can be killed. This module contains the workflows of kills.yaml, the
outcome of a run, and its leftovers.

run = Run("jobs", home, environment, url); run.start_and_kill("effect", 17); problems(run, expected)
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from argolocal.controllers.deployment import Deployments
from argolocal.controllers.memory_volumes import shared_memory_path
from argolocal.engine import suspend
from argolocal.engine.nodes import FAILED_PHASES, FULFILLED_PHASES
from argolocal.errors import ConfigError
from argolocal.manifest.object_labels import CONFIG_MAP_TYPE_LABEL
from argolocal.runner.run import resume_suspended
from argolocal.state.journal import Busy, RunFiles
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.training_job import SUCCEEDED_PODS_ANNOTATION
from rekindle.local.services.services import DEFAULT_BUCKET
from rekindle.storage import Store
from tests.waiting import until

# time limit for the exit of a run's last processes
EXIT_TIMEOUT_S = 3.0
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
CLOCK = ("startedAt", "finishedAt")
# ports below the range of ephemeral ports
PORTS = count(20000 + os.getpid() % 10000)
# values for suspended steps
ANSWERS = {"go": "YES"}
# name of a run of the workflow "files" with the embedded object store
EMBEDDED = "services"
BODY = """echo "begin $POD.$ME{0} $$$$" >> $HOME_OF_ALL/marks; ({1})
code=$?; echo "end $POD.$ME{0} $$$$" >> $HOME_OF_ALL/marks; exit $code"""
ENVIRONMENT = [
    {"name": "POD", "value": "{{pod.name}}"},
    {"name": "HOME_OF_ALL", "value": "@HOME@"},
    *(
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field_path}}}
        for name, field_path in (("ME", "metadata.name"), ("IP", "status.podIP"))
    ),
]
RUNNER = """
import json, os, signal, sys, threading
from pathlib import Path
from argolocal import validate as lint
from rekindle.local.cluster import LocalCluster
from argolocal.runner.run import LocalRun, resume_suspended
import boto3
home, what, last = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
values, seen, runner = json.loads(sys.argv[4]), {"call": 0, "effect": 0}, os.getpid()
EFFECTS = {"write", "pwrite", "replace", "rename", "unlink", "mkdir", "rmdir", "truncate", "ftruncate", "fork_exec"}
EFFECTS |= {"flock", "kill", "killpg", "sendall", "link"}

def count(frame, event, what):
    seen["call"] += 1
    if event[:2] == "c_" and what.__name__ in EFFECTS:
        seen["effect"] += 1
    if any(seen[kind] >= number for kind, number in last.items()) and os.getpid() == runner:  # not in a child process
        os.kill(runner, signal.SIGKILL)

threading.setprofile(count)
sys.setprofile(count)
cluster = LocalCluster(home)
if (home / "runs" / what / "manifest.yaml").exists():
    resume_suspended(what, values, home)
    LocalRun.load(what, cluster).run()
else:
    LocalRun.create(json.loads((home / "w.json").read_text()), {}, cluster).run()
sys.setprofile(None)
threading.setprofile(None)
(home / "seen").write_text(json.dumps(seen))
"""


@cache
def make_documents() -> list[Any]:
    """Return the objects of kills.yaml, with the values that the workflows need to run."""
    objects = list(yaml.safe_load_all(Path(__file__).with_name("kills.yaml").read_text()))
    for obj in objects:
        obj.setdefault("kind", "Workflow")
        _complete(obj)
    return objects


def _complete(value: Any) -> None:
    for child in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _complete(child)

    if not isinstance(value, dict):
        return

    if "args" in value and "image" not in value:
        body = BODY.format(f".{value['name']}" if "name" in value else "", value["args"][0])
        value["image"] = "busybox"
        value["command"] = ["sh", "-c"]
        value["args"] = [body]
        value["env"] = ENVIRONMENT

    if isinstance(value.get("manifest"), dict):
        value["manifest"] = json.dumps(value["manifest"])


def make_workflows() -> dict[str, dict[str, Any]]:
    """Return the workflows of kills.yaml by name."""
    make_workflows = {
        obj["metadata"]["name"]: obj for obj in make_documents() if obj["kind"] == "Workflow"
    }
    return make_workflows | {EMBEDDED: {**make_workflows["files"], "metadata": {"name": EMBEDDED}}}


@dataclass
class Run:
    """One run in its own home (directory of runs)."""

    name: str
    home: Path
    # the text includes the address of an object store
    environment: dict[str, str]
    url: str

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        self.shared = tempfile.TemporaryDirectory(prefix="rekindle-kills-", dir="/dev/shm")
        # use a folder that pods with a private /tmp see
        self.notes = Path(self.shared.name)
        bucket = f"kills-{self.home.name}"
        self.cluster = LocalCluster(self.home)

        self.files = RunFiles(self.home, self.name)
        if self.name == EMBEDDED:
            store_environment = {}
        else:
            store_environment = {**self.environment, "S3_BUCKET": bucket}

        if store_environment:
            store = self.store = Store(
                bucket,
                store_environment["S3_ENDPOINT_URL"],
                *(store_environment[key] for key in KEYS),
            )
            store.client.create_bucket(Bucket=bucket)

        self.environment = {**os.environ, **store_environment, "HOME_OF_ALL": str(self.notes)}
        self.cluster.store_objects(obj for obj in make_documents() if obj["kind"] != "Workflow")
        text = json.dumps(make_workflows()[self.name])
        text = text.replace('\\"@PORT@\\"', "@PORT@").replace("@PORT@", str(_free_port()))
        text = text.replace("@HOME@", str(self.notes)).replace("@URL@", self.url)
        text = text.replace("@BUCKET@", store_environment.get("S3_BUCKET", DEFAULT_BUCKET))
        (self.home / "w.json").write_text(text)

    def start_and_kill(self, kind: str = "", moment: float = 0) -> bool:
        """Start a runner, and kill it at the given second, function call or external effect. Return
        True if the runner ended before the kill."""
        last_moment = {kind: int(moment)} if kind in ("call", "effect") else {}
        values = json.dumps(self.answers())

        command = [
            sys.executable,
            "-c",
            RUNNER,
            str(self.home),
            self.name,
            json.dumps(last_moment),
            values,
        ]

        with open(self.home / "said", "ab") as log:
            runner = subprocess.Popen(
                command, start_new_session=True, stdout=log, stderr=log, env=self.environment
            )

        def has_ended() -> bool:
            # the suspended step was resumed in the meantime
            with contextlib.suppress(ConfigError, Busy):
                self.release()
            return runner.poll() is not None

        with contextlib.suppress(AssertionError):
            until("the end of the runner", has_ended, moment if kind in ("time", "group") else 60)

        if runner.poll() is None:
            (os.killpg if kind == "group" else os.kill)(runner.pid, signal.SIGKILL)

        return runner.wait() == 0

    def release(self) -> None:
        """Resume suspended steps, as `rekindle resume -p` does in another terminal."""
        values = self.answers()
        if values or self.waiting() or self.files.workflow()["spec"].get("suspend"):
            resume_suspended(self.name, values, self.home)

    def waiting(self) -> list[Any]:
        return [
            node
            for node in suspend.list_suspended_nodes(self.status())
            if node["templateName"] != "pause"
        ]

    def answers(self) -> dict[str, str]:
        names = {
            parameter["name"]
            for node in self.waiting()
            for parameter in (node.get("outputs") or {}).get("parameters") or []
        }
        return {name: value for name, value in ANSWERS.items() if name in names}

    def status(self) -> dict[str, Any]:
        return self.files.load()[0]

    def ended_pods(self) -> dict[str, int]:
        """Return the pods with a recorded end, and the number of starts of each pod until then."""
        nodes = [
            node for node in self.status()["nodes"].values() if node["phase"] in FULFILLED_PHASES
        ]
        ended = {node["id"].rpartition("-")[2] for node in nodes if node["type"] in ("Pod", "HTTP")}
        jobs = [
            json.loads(path.read_text()) for path in self.home.glob("objects/PyTorchJob/*.json")
        ]

        replicas = {
            name
            for job in jobs
            for name in job["metadata"]["annotations"].get(SUCCEEDED_PODS_ANNOTATION, "").split(",")
        }

        starts = self.starts()
        name_parts = {mark: mark.split(".") for mark in starts}

        return {
            mark: starts[mark]
            for mark, (pod, replica, *_) in name_parts.items()
            if pod.rpartition("-")[2] in ended or replica in replicas
        }

    def starts(self) -> Counter[str]:
        """Return the number of starts of each pod."""
        return Counter(mark.split()[1] for mark in self.marks() if mark.startswith("begin"))

    def marks(self) -> list[str]:
        path = self.notes / "marks"
        if path.exists():
            return path.read_text().splitlines()
        return []

    def outcome(self) -> Any:
        """Return all results of the run that a killed runner must not change."""
        status = self.status()
        nodes = {}

        for node in status["nodes"].values():
            fields = {key: value for key, value in node.items() if key not in CLOCK}
            if "message" in fields:  # the message may contain the name of a log file
                fields["message"] = fields["message"].replace(str(self.home), "HOME")

            nodes[node["name"]] = fields | {"children": sorted(node.get("children", []))}

        outputs = {
            kind: sorted(entries, key=lambda entry: entry["name"])
            for kind, entries in (status.get("outputs") or {}).items()
        }

        return {
            "phase": status["phase"],
            "message": status.get("message"),
            "outputs": outputs,
            "nodes": nodes,
            "ran": sorted({mark.split()[1] for mark in self.marks() if mark.startswith("end")}),
            "objects": sorted(self._read_objects(), key=str),
            "deployments": self._list_deployments(),
            "stored": self._read_store(),
            "directories": sorted(
                path.name for path in [*self.files.pods.glob("*"), *self.home.glob("claims/*")]
            ),
        }

    def _read_objects(self) -> Iterator[Any]:
        for path in self.home.glob("objects/*/[!.]*"):
            obj = json.loads(path.read_text())
            meta = obj["metadata"]
            data = obj.get("data")
            if (meta.get("labels") or {}).get(CONFIG_MAP_TYPE_LABEL):
                # remove the entries of a cache, which contain times
                data = sorted(data)
            ended = [
                condition["type"]
                for condition in (obj.get("status") or {}).get("conditions") or []
                if condition["type"] in FAILED_PHASES
            ]
            yield path.parent.name, meta.get("generateName") or path.name, data, ended

    def _list_deployments(self) -> list[tuple[str, bool, int]]:
        return [
            (deployment["name"], deployment["running"], deployment["ready"])
            for deployment in Deployments(self.cluster).overview()
        ]

    def _read_store(self) -> dict[str, Any]:
        """Return the contents of the object store."""
        if self.name == EMBEDDED:
            keys = self.cluster.services.credentials()
            self.store = Store(
                "rekindle", self.cluster.services.url("s3"), *(keys[key] for key in KEYS)
            )
        objects = {
            stored_object.key: self.store.get(stored_object.key)
            for stored_object in self.store.list("")
        }
        return {key: _parse_artifact(data) for key, data in objects.items()}

    def leftovers(self) -> list[str]:
        """Return processes, locks and files that remain after the end of the run and its
        services."""
        self.cluster.down()
        # processes that remain after the timeout are reported below
        with contextlib.suppress(AssertionError):
            until("its processes to end", lambda: not self._find_orphans(), EXIT_TIMEOUT_S)

        leftovers = self._find_orphans()
        pid = self.files.runner()
        if pid:
            leftovers.append(f"the run is locked by {pid}")

        for path in self.home.glob("locks/*/*"):
            with path.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    leftovers.append(f"locked: {path}")

        jobs = [path.stem for path in self.home.glob("objects/PyTorchJob/*.json")]
        memory = [shared_memory_path(self.files.root, name) for name in [*jobs, "wrong"]]
        return leftovers + [
            f"left behind: {path}" for path in [*memory, self.files.resume_request] if path.exists()
        ]

    def _find_orphans(self) -> list[str]:
        mark = f"HOME_OF_ALL={self.notes}\0".encode()
        orphans = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes() + b"\0":
                    orphans.append(f"orphan {process.name}: {(process / 'cmdline').read_text()}")
            except OSError:
                # the process exited or belongs to another user
                continue
        return orphans


def _parse_artifact(data: bytes) -> Any:
    """Return a hash, or the files of a tarball without their times."""
    if not data.startswith(b"\x1f\x8b"):
        return hashlib.sha256(data).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive]
        return [
            (name, file and hashlib.sha256(file.read()).hexdigest())
            for name, file in sorted(files, key=str)
        ]


def _free_port() -> int:
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError


def find_problems(run: Run, expected: Any) -> list[str]:
    """Return the problems of a completed run: differences from an undisturbed run, repeated steps,
    and leftovers."""
    differences = _list_differences(expected, run.outcome())
    return [*find_overlaps(run.marks()), *run.leftovers(), *differences]


def find_restarts(ended_pods: dict[str, int], starts: Counter[str]) -> list[str]:
    """Return the pods that started again after their recorded end."""
    return [
        f"{pod} was over and began again"
        for pod, count in ended_pods.items()
        if starts[pod] > count
    ]


def find_overlaps(marks: list[str]) -> list[str]:
    """Return the pods that ended only after the pod that replaced them had started."""
    last: dict[str, str] = {}
    messages = []
    for line in marks:
        event, pod, pid = line.split()
        if event == "begin":
            last[pod] = pid
        elif last[pod] != pid:
            messages.append(f"{pod}: process {pid} ended after {last[pod]} had begun")
    return messages


def _list_differences(undisturbed: Any, other: Any, path_text: str = "") -> list[str]:
    if isinstance(undisturbed, dict) and isinstance(other, dict):
        return [
            text
            for key in sorted({*undisturbed, *other})
            for text in _list_differences(
                undisturbed.get(key), other.get(key), f"{path_text}.{key}"
            )
        ]
    if undisturbed == other:
        return []
    return [f"{path_text.strip('.')} is {other!r}, undisturbed {undisturbed!r}"]
