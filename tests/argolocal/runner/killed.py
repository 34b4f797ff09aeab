"""One run whose runner can be killed: the workflows of kills.yaml as they can run, what came of one, what it left.

run = Run("jobs", home, environment, url); run.go("effect", 17); judged(run, expected)
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
from argolocal.controllers.memory import shared_memory
from argolocal.engine import suspend
from argolocal.engine.nodes import FAILED, FULFILLED
from argolocal.errors import ConfigError
from argolocal.manifest.names import CONFIG_MAP_TYPE
from argolocal.runner.run import release_suspended
from argolocal.state.journal import Busy, RunFiles
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.training_job import SUCCEEDED
from rekindle.local.services.services import BUCKET
from rekindle.storage import Store
from tests.waiting import until

PATIENCE = 3.0  # seconds in which the last processes of a run may end
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
CLOCK = ("startedAt", "finishedAt")
PORTS = count(20000 + os.getpid() % 10000)  # below those that are given to whoever connects
ANSWERS = {"go": "YES"}  # what suspended steps are told
EMBEDDED = "services"  # the workflow "files" with the object store of its home
BODY = """echo "begin $POD.$ME{0} $$$$" >> $HOME_OF_ALL/marks; ({1})
code=$?; echo "end $POD.$ME{0} $$$$" >> $HOME_OF_ALL/marks; exit $code"""
ENVIRONMENT = [
    {"name": "POD", "value": "{{pod.name}}"},
    {"name": "HOME_OF_ALL", "value": "@HOME@"},
    *(
        {"name": n, "valueFrom": {"fieldRef": {"fieldPath": p}}}
        for n, p in (("ME", "metadata.name"), ("IP", "status.podIP"))
    ),
]
RUNNER = """
import json, os, signal, sys, threading
from pathlib import Path
from argolocal import validate as lint
from rekindle.local.cluster import LocalCluster
from argolocal.runner.run import LocalRun, release_suspended
import boto3
home, what, last = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
values, seen, runner = json.loads(sys.argv[4]), {"call": 0, "effect": 0}, os.getpid()
EFFECTS = {"write", "pwrite", "replace", "rename", "unlink", "mkdir", "rmdir", "truncate", "ftruncate", "fork_exec"}
EFFECTS |= {"flock", "kill", "killpg", "sendall", "link"}

def count(frame, event, what):
    seen["call"] += 1
    if event[:2] == "c_" and what.__name__ in EFFECTS:
        seen["effect"] += 1
    if any(seen[kind] >= number for kind, number in last.items()) and os.getpid() == runner:  # no child of it
        os.kill(runner, signal.SIGKILL)

threading.setprofile(count)
sys.setprofile(count)
cluster = LocalCluster(home)
if (home / "runs" / what / "manifest.yaml").exists():
    release_suspended(what, values, home)
    LocalRun.old(what, cluster).run()
else:
    LocalRun.new(json.loads((home / "w.json").read_text()), {}, cluster).run()
sys.setprofile(None)
threading.setprofile(None)
(home / "seen").write_text(json.dumps(seen))
"""


@cache
def documents() -> list[Any]:
    """Those of kills.yaml, as they can run."""
    objects = list(yaml.safe_load_all(Path(__file__).with_name("kills.yaml").read_text()))
    for obj in objects:
        obj.setdefault("kind", "Workflow")
        _complete(obj)
    return objects


def _complete(value: Any) -> None:
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _complete(child)
    if not isinstance(value, dict):
        return
    if "args" in value and "image" not in value:
        body = BODY.format(f".{value['name']}" if "name" in value else "", value["args"][0])
        value |= {"image": "busybox", "command": ["sh", "-c"], "args": [body], "env": ENVIRONMENT}
    if isinstance(value.get("manifest"), dict):
        value["manifest"] = json.dumps(value["manifest"])


def workflows() -> dict[str, dict[str, Any]]:
    """By name."""
    workflows = {obj["metadata"]["name"]: obj for obj in documents() if obj["kind"] == "Workflow"}
    return workflows | {EMBEDDED: {**workflows["files"], "metadata": {"name": EMBEDDED}}}


@dataclass
class Run:
    """One run in a home of its own."""

    name: str
    home: Path
    environment: dict[str, str]  # with a store; the bucket is its own
    url: str

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        self.shared = tempfile.TemporaryDirectory(prefix="rekindle-kills-", dir="/dev/shm")
        self.notes = Path(self.shared.name)  # which pods with a /tmp of their own see, too
        bucket = f"kills-{self.home.name}"
        self.cluster = LocalCluster(self.home)
        self.files = RunFiles(self.home, self.name)
        own = {} if self.name == EMBEDDED else {**self.environment, "S3_BUCKET": bucket}
        if own:
            store = self.store = Store(bucket, own["S3_ENDPOINT_URL"], *(own[key] for key in KEYS))
            store.client.create_bucket(Bucket=bucket)
        self.environment = {**os.environ, **own, "HOME_OF_ALL": str(self.notes)}
        self.cluster.keep(obj for obj in documents() if obj["kind"] != "Workflow")
        text = json.dumps(workflows()[self.name])
        text = text.replace('\\"@PORT@\\"', "@PORT@").replace("@PORT@", str(_free_port()))
        text = text.replace("@HOME@", str(self.notes)).replace("@URL@", self.url)
        text = text.replace("@BUCKET@", own.get("S3_BUCKET", BUCKET))
        (self.home / "w.json").write_text(text)

    def go(self, how: str = "", at: float = 0) -> bool:
        """Starts a runner, and kills it at that second, call or effect unless it is over before. Whether it is."""
        last = {how: int(at)} if how in ("call", "effect") else {}
        values = json.dumps(self.answers())
        command = [sys.executable, "-c", RUNNER, str(self.home), self.name, json.dumps(last), values]
        with open(self.home / "said", "ab") as said:
            runner = subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said, env=self.environment)

        def over() -> bool:
            with contextlib.suppress(ConfigError, Busy):  # it was let go meanwhile
                self.release()
            return runner.poll() is not None

        with contextlib.suppress(AssertionError):
            until("the end of the runner", over, at if how in ("time", "group") else 60)
        if runner.poll() is None:
            (os.killpg if how == "group" else os.kill)(runner.pid, signal.SIGKILL)
        return runner.wait() == 0

    def release(self) -> None:
        """As `rekindle resume -p` in another terminal."""
        if (values := self.answers()) or self.waiting() or self.files.workflow()["spec"].get("suspend"):
            release_suspended(self.name, values, self.home)

    def waiting(self) -> list[Any]:
        return [node for node in suspend.suspended(self.status()) if node["templateName"] != "pause"]

    def answers(self) -> dict[str, str]:
        asked = {
            parameter["name"]
            for node in self.waiting()
            for parameter in (node.get("outputs") or {}).get("parameters") or []
        }
        return {name: value for name, value in ANSWERS.items() if name in asked}

    def status(self) -> dict[str, Any]:
        return self.files.load()[0]

    def over(self) -> dict[str, int]:
        """Pods of which the end is recorded, and how often each had begun by then."""
        nodes = [node for node in self.status()["nodes"].values() if node["phase"] in FULFILLED]
        ended = {node["id"].rpartition("-")[2] for node in nodes if node["type"] in ("Pod", "HTTP")}
        jobs = [json.loads(path.read_text()) for path in self.home.glob("objects/PyTorchJob/*.json")]
        replicas = {name for job in jobs for name in job["metadata"]["annotations"].get(SUCCEEDED, "").split(",")}
        begun = self.begun()
        parts = {mark: mark.split(".") for mark in begun}
        return {
            mark: begun[mark]
            for mark, (pod, replica, *_) in parts.items()
            if pod.rpartition("-")[2] in ended or replica in replicas
        }

    def begun(self) -> Counter[str]:
        """How often each pod began."""
        return Counter(mark.split()[1] for mark in self.marks() if mark.startswith("begin"))

    def marks(self) -> list[str]:
        path = self.notes / "marks"
        return path.read_text().splitlines() if path.exists() else []

    def outcome(self) -> Any:
        """All that must be the same."""
        status = self.status()
        nodes = {}
        for node in status["nodes"].values():
            kept = {key: value for key, value in node.items() if key not in CLOCK}
            nodes[node["name"]] = kept | {"children": sorted(node.get("children", []))}
        outputs = {
            kind: sorted(entries, key=lambda e: e["name"]) for kind, entries in (status.get("outputs") or {}).items()
        }
        return {
            "phase": status["phase"], "message": status.get("message"), "outputs": outputs, "nodes": nodes,
            "ran": sorted({mark.split()[1] for mark in self.marks() if mark.startswith("end")}),
            "objects": sorted(self._objects(), key=str), "deployments": self._deployments(), "stored": self._stored(),
            "directories": sorted(path.name for path in [*self.files.pods.glob("*"), *self.home.glob("claims/*")]),
        }  # fmt: skip

    def _objects(self) -> Iterator[Any]:
        for path in self.home.glob("objects/*/[!.]*"):
            obj = json.loads(path.read_text())
            meta, data = obj["metadata"], obj.get("data")
            if (meta.get("labels") or {}).get(CONFIG_MAP_TYPE):
                data = sorted(data)  # a cache: its entries have times
            ended = [
                condition["type"]
                for condition in (obj.get("status") or {}).get("conditions") or []
                if condition["type"] in FAILED
            ]
            yield path.parent.name, meta.get("generateName") or path.name, data, ended

    def _deployments(self) -> list[tuple[str, bool, int]]:
        return [
            (deployment["name"], deployment["running"], deployment["ready"])
            for deployment in Deployments(self.cluster).overview()
        ]

    def _stored(self) -> dict[str, Any]:
        """What is in the object store."""
        if self.name == EMBEDDED:
            keys = self.cluster.services.credentials()
            self.store = Store("rekindle", self.cluster.services.url("s3"), *(keys[key] for key in KEYS))
        objects = {entry.key: self.store.get(entry.key) for entry in self.store.list("")}
        return {key: _content(data) for key, data in objects.items()}

    def left(self) -> list[str]:
        """Processes, locks and files that nobody must have once it is over and its services are stopped."""
        self.cluster.down()
        with contextlib.suppress(AssertionError):  # those that stay are reported below
            until("its processes to end", lambda: not self._processes(), PATIENCE)
        leftovers = self._processes()
        if pid := self.files.runner():
            leftovers.append(f"the run is locked by {pid}")
        for path in self.home.glob("locks/*/*"):
            with path.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    leftovers.append(f"locked: {path}")
        jobs = [path.stem for path in self.home.glob("objects/PyTorchJob/*.json")]
        memory = [shared_memory(self.files.root, name) for name in [*jobs, "wrong"]]
        return leftovers + [f"left behind: {path}" for path in [*memory, self.files.resume_request] if path.exists()]

    def _processes(self) -> list[str]:
        mark, orphans = f"HOME_OF_ALL={self.notes}\0".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes() + b"\0":
                    orphans.append(f"orphan {process.name}: {(process / 'cmdline').read_text()}")
            except OSError:
                continue  # it ended meanwhile, or is not ours
        return orphans


def _content(data: bytes) -> Any:
    """Of a tarball what is in it, without its times."""
    if not data.startswith(b"\x1f\x8b"):
        return hashlib.sha256(data).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive]
        return [(name, file and hashlib.sha256(file.read()).hexdigest()) for name, file in sorted(files, key=str)]


def _free_port() -> int:
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError


def judged(run: Run, expected: Any) -> list[str]:
    """What is wrong with a run that is over."""
    differences = _differences(expected, run.outcome())
    return [*overlaps(run.marks()), *run.left(), *differences]


def again(over: dict[str, int], begun: Counter[str]) -> list[str]:
    """Pods that were over, and began once more."""
    return [f"{pod} was over and began again" for pod, count in over.items() if begun[pod] > count]


def overlaps(marks: list[str]) -> list[str]:
    """Pods of which one ended after its successor had begun."""
    last: dict[str, str] = {}
    found = []
    for line in marks:
        what, pod, pid = line.split()
        if what == "begin":
            last[pod] = pid
        elif last[pod] != pid:
            found.append(f"{pod}: process {pid} ended after {last[pod]} had begun")
    return found


def _differences(undisturbed: Any, other: Any, where: str = "") -> list[str]:
    if isinstance(undisturbed, dict) and isinstance(other, dict):
        return [
            text
            for key in sorted({*undisturbed, *other})
            for text in _differences(undisturbed.get(key), other.get(key), f"{where}.{key}")
        ]
    return [] if undisturbed == other else [f"{where.strip('.')} is {other!r}, undisturbed {undisturbed!r}"]
