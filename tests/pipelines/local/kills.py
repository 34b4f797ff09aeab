"""Prove that a run does not notice the death of its runner: kill it at seeded moments, resume, compare what came of it.

python -m tests.pipelines.local.kills 17            one seed, again
python -m tests.pipelines.local.kills --count 100   seeds 0..99, some at a time

The workflows are those of kills.yaml. A seed says which of them, how often its runner is killed (also while it
resumes), and when: after a time, at a call of the runner's own code, or the whole process group of it.
"""

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipelines.local.services import Services
from pipelines.local.state import RunFiles
from pipelines.local.table import FULFILLED
from steps.storage import Store

PATIENCE = 3.0  # seconds in which the last processes of a run may end
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
CLOCK = ("startedAt", "finishedAt")
BODY = """echo "begin $POD $$$$" >> $HOME_OF_ALL/marks; ({})
code=$?; echo "end $POD $$$$" >> $HOME_OF_ALL/marks; exit $code"""
RUNNER = """
import json, os, signal, sys
from pathlib import Path
from pipelines import lint
from pipelines.local.cluster import LocalCluster
from pipelines.local.resources import controllers
from pipelines.local.run import execute, resume
import boto3
home, what, last, calls = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 0

def count(*_):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)

sys.setprofile(count)
if (home / "runs" / what / "manifest.yaml").exists():
    resume(what, LocalCluster(home))
else:
    execute(json.loads((home / "w.json").read_text()), {}, LocalCluster(home))
sys.setprofile(None)
(home / "calls").write_text(str(calls))
"""


@cache
def workflows() -> dict[str, dict[str, Any]]:
    """Those of kills.yaml, as they can run."""
    found = {}
    for each in yaml.safe_load_all(Path(__file__).with_suffix(".yaml").read_text()):
        pending = [each]
        for value in pending:  # every container without an image
            pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
            if isinstance(value, dict) and isinstance(main := value.get("container"), dict) and "image" not in main:
                main |= {"image": "busybox", "command": ["sh", "-c"], "args": [BODY.format(main["args"][0])]}
                main["env"] = [{"name": "POD", "value": "{{pod.name}}"}, {"name": "HOME_OF_ALL", "value": "HOME"}]
        found[each["metadata"]["name"]] = {"kind": "Workflow", **each}
    return found


@dataclass(frozen=True)
class Plan:
    """What is done to which workflow; each kill as (how, at which part of an undisturbed run)."""

    seed: int
    name: str
    kills: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, seed: int) -> "Plan":
        draw = random.Random(seed)
        names = sorted(workflows())
        kills = [
            (draw.choice(["time", "group", "call", "call"]), draw.random()) for _ in range(draw.choice([1, 1, 2, 3]))
        ]
        return cls(seed, names[seed % len(names)], tuple(kills))


@dataclass
class Run:
    """One run in a home of its own."""

    name: str
    home: Path
    environment: dict[str, str]  # with a store; the bucket is its own

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        environment = {**self.environment, "S3_BUCKET": f"kills-{self.home.name}"}
        store = Store(environment["S3_BUCKET"], environment["S3_ENDPOINT_URL"], *(environment[key] for key in KEYS))
        store.client.create_bucket(Bucket=store.bucket)
        self.environment = {**os.environ, **environment}
        self.files = RunFiles(self.home, self.name)
        text = json.dumps(workflows()[self.name])
        (self.home / "w.json").write_text(text.replace('"HOME"', json.dumps(str(self.home))))

    def go(self, how: str = "time", seconds: float = 30, calls: int = 0) -> bool:
        """Starts a runner and kills it then, unless it is over before. Whether it is."""
        command = [sys.executable, "-c", RUNNER, str(self.home), self.name, str(calls)]
        with open(self.home / "said", "ab") as said:
            runner = subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said, env=self.environment)
        try:
            runner.wait(seconds)
        except subprocess.TimeoutExpired:
            (os.killpg if how == "group" else os.kill)(runner.pid, signal.SIGKILL)
            return runner.wait() == 0
        return runner.returncode == 0

    def status(self) -> dict[str, Any]:
        return self.files.load()[0]

    def over(self) -> dict[str, int]:
        """Pods of which the end is recorded, and how often each had begun by then."""
        begun = Counter(line.split()[1] for line in self.marks() if line.startswith("begin"))
        nodes = self.status()["nodes"].values()
        ended = {
            node["id"].rpartition("-")[2] for node in nodes if node["type"] == "Pod" and node["phase"] in FULFILLED
        }
        return {pod: count for pod, count in begun.items() if pod.rpartition("-")[2] in ended}

    def marks(self) -> list[str]:
        path = self.home / "marks"
        return path.read_text().splitlines() if path.exists() else []

    def outcome(self) -> Any:
        """All that must be the same."""
        status = self.status()
        nodes = {}
        for node in status["nodes"].values():
            kept = {key: value for key, value in node.items() if key not in CLOCK}
            nodes[node["name"]] = kept | {"children": sorted(node.get("children", []))}
        objects = {
            str(path.relative_to(self.home)): json.loads(path.read_text()).get("data") and path.stem
            for path in (self.home / "objects").rglob("[!.]*.json")
        }
        outputs = {kind: sorted(each, key=lambda e: e["name"]) for kind, each in (status.get("outputs") or {}).items()}
        ran = {line.split()[1] for line in self.marks() if line.startswith("end")}
        rest = sorted(path.name for path in self.files.pods.glob("*"))
        return {
            "phase": status["phase"], "message": status.get("message"), "outputs": outputs, "nodes": nodes,
            "ran": sorted(ran), "objects": len(objects), "directories": rest,
        }  # fmt: skip

    def left(self) -> list[str]:
        """Processes and locks that nobody must have once it is over."""
        until = time.monotonic() + PATIENCE
        while (found := self._processes()) and time.monotonic() < until:
            time.sleep(0.02)
        if pid := self.files.runner():
            found.append(f"the run is locked by {pid}")
        for path in self.home.glob("locks/*/*"):
            with path.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(f"locked: {path}")
        return found

    def _processes(self) -> list[str]:
        mark, found = f"HOME_OF_ALL={self.home}\0".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes() + b"\0":
                    found.append(f"orphan {process.name}: {(process / 'cmdline').read_text()}")
            except OSError:
                continue  # it ended meanwhile, or is not ours
        return found


class Stage:
    """Where plans are played: what undisturbed runs come to, how long they take, and in how many calls."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.expected: dict[str, tuple[Any, float, int]] = {}

    def undisturbed(self, name: str) -> tuple[Any, float, int]:
        if name not in self.expected:
            run = Run(name, self.folder / f"{name}-alone", self.environment)
            began = time.monotonic()
            assert run.go(), (run.home / "said").read_text()
            seconds = time.monotonic() - began
            assert not run.left()
            self.expected[name] = run.outcome(), seconds, int((run.home / "calls").read_text())
        return self.expected[name]

    def play(self, plan: Plan) -> list[str]:
        """What went wrong."""
        expected, seconds, calls = self.undisturbed(plan.name)
        run = Run(plan.name, self.folder / f"{plan.seed}", self.environment)
        problems: list[str] = []
        for how, part in (*plan.kills, ("", 0.0)):
            over = run.over()
            if run.status()["phase"] in FULFILLED:
                break
            at = {"call": {"calls": int(calls * part)}, "": {}}.get(how, {"seconds": part * seconds})
            done = run.go(how, **at)
            later = Counter(line.split()[1] for line in run.marks() if line.startswith("begin"))
            problems += [f"{pod} was over and began again" for pod, count in over.items() if later[pod] > count]
            if not how and not done:
                return [*problems, f"it did not end: {(run.home / 'said').read_text()[-2000:]}"]
        problems += [*overlaps(run.marks()), *run.left(), *_differences(expected, run.outcome())]
        return problems


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


def _differences(one: Any, other: Any, where: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            text
            for key in sorted({*one, *other})
            for text in _differences(one.get(key), other.get(key), f"{where}.{key}")
        ]
    return [] if one == other else [f"{where.strip('.')} is {other!r}, undisturbed {one!r}"]


def main(argv: list[str]) -> int:
    """The command; exit code 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines.local.kills", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=100, help="without seeds: how many")
    parser.add_argument("--first", type=int, default=0, help="without seeds: the first")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    given = parser.parse_args(argv)
    seeds = given.seeds or range(given.first, given.first + given.count)
    failed = 0
    plans = [Plan.of(seed) for seed in seeds]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        services = Services(Path(folder) / "services", {})
        try:
            keys = services.credentials()
            stage = Stage(Path(folder), keys | {"S3_ENDPOINT_URL": services.url("s3")})
            for name in workflows():
                stage.undisturbed(name)
            for plan, problems in zip(plans, pool.map(stage.play, plans), strict=True):
                failed += bool(problems)
                print("\n  FAILED ".join([f"{plan}", *problems]), flush=True)
        finally:
            services.down()
    kinds = Counter(how for plan in plans for how, _ in plan.kills)
    print(f"{len(plans)} runs, {sum(kinds.values())} kills {dict(kinds)}, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
