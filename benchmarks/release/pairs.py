"""Test pairs of simultaneous runs, which compare their models with the same champion. Some runs are
killed and resumed, and some pairs are disturbed by a rollback.

    python -m benchmarks.release.pairs [--pairs 200] [--minutes 60] [--rollbacks 20] [--seed 1] \\
      [--json]

Each pair has two candidates of different quality, and starts its runs up to a few seconds apart.
One third of the pairs runs in one home with the mutex of `decide`, one third in one home without
the mutex, and one third in two homes that share the object store and MLflow. The evaluations are
read from the records of the releases and of MLflow. At the end, rollbacks are killed at random
times, which `--seed` determines, and repeated.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.loop import free_port
from rekindle import tracking
from rekindle.kubernetes_names import INSTANCE_LABEL
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import Services
from rekindle.release import promotion
from rekindle.storage import NotFound, Store

NAME = "pairs"
CONFIG = """
name: pairs
pipeline: benchmarks.release.pipeline
workload: benchmarks.workloads.quality
data: {source: "rows://"}
gate: {minimum: {quality: 0}, tolerance: 0}
serve: {min_replicas: 1, drain_seconds: 0.1, keep_releases: 5}
"""
MODES = ("mutex", "no mutex", "two homes")
KINDS = ("verdict", "promotion", "end")  # kinds of problems; each has its own figure
Problem = tuple[str, str]  # (kind, description of the problem)


class Home:
    """A home with its own runs and servers, which stands for a namespace of a cluster."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.resumed = 0
        self.environment = {
            **os.environ,
            "REKINDLE_HOME": str(folder),
            "REKINDLE_SERVE__PORT": str(port),
        }
        cluster = LocalCluster(folder)
        self.kinds = cluster.kinds.controllers(cluster, folder / "run")

    def rekindle(self, *arguments: str, kill_s: float = 0) -> tuple[int, dict[str, Any], str]:
        """Run a command, and kill it after `kill_s` seconds (0: never). Return its exit code, JSON
        output and stderr."""
        command = [sys.executable, "-m", "rekindle", *arguments, "-o", "json"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=self.environment, stdout=pipe, stderr=pipe, text=True
        )
        timer = threading.Timer(kill_s, process.send_signal, (signal.SIGKILL,))

        if kill_s:
            timer.start()

        stdout, stderr = process.communicate()
        timer.cancel()
        return process.returncode, json.loads(stdout or "{}"), stderr

    def run(
        self, config: Path, quality: float, mutex: bool, kills: list[float]
    ) -> tuple[int, dict[str, Any], str]:
        """Run the pipeline, and resume it after each kill."""
        sets = (f"candidate.quality={quality}", f"candidate.mutex={str(mutex).lower()}")

        command = (
            "run",
            str(config),
            "--no-cache",
            *(flag for each in sets for flag in ("--set", each)),
        )

        moments = [*kills, 0]

        code, result, stderr = self.rekindle(*command, kill_s=moments.pop(0))
        while code == -signal.SIGKILL:
            manifests = self.folder.glob("runs/*/manifest.yaml")
            name = next(
                (path.parent.name for path in manifests if f'"{quality}"' in path.read_text()), ""
            )
            # the name is missing if the command was killed before its run began
            command = ("resume", name) if name else command
            self.resumed += bool(name)
            code, result, stderr = self.rekindle(*command, kill_s=moments.pop(0))

        return code, result, stderr

    def deployments(self) -> dict[str, int]:
        """Return the number of pods of each Deployment."""
        objects = [self.kinds["Deployment"].read(name) for name in self.kinds["Deployment"].names()]
        return {obj["metadata"]["name"]: obj["spec"]["replicas"] for obj in objects if obj}

    def serving(self) -> str:
        """Return the name of the Deployment that gets the traffic."""
        service = self.kinds["Service"].read(NAME)
        if service:
            return service["spec"]["selector"][INSTANCE_LABEL]
        return ""


class Champions:
    """The sequence of champions, which a thread reads from the object promotion.json."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.over = threading.Event()
        # (version, True if a rollback made this version the champion)
        self.changes: list[tuple[str, bool]] = []

    def watch(self) -> None:
        while not self.over.wait(0.03):
            try:
                state = json.loads(self.store.get(f"releases/{NAME}/promotion.json"))
            except NotFound:
                continue
            if state.get("version") and (
                not self.changes or self.changes[-1][0] != state["version"]
            ):
                self.changes.append((state["version"], "rollback" in state))

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self.watch)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()


def quality_of(release: tracking.Release) -> float:
    return json.loads(Store.from_env().get(f"{release.uri}model.safetensors"))[0]


def run_pair(
    homes: list[Home], config: Path, draw: Random, mode: str
) -> tuple[str, int, list[Problem]]:
    """Run a pair of pipelines, at random with kills and a rollback. Return a log, the number of
    repeated evaluations, and the problems."""
    pair_homes = homes if mode == "two homes" else [homes[0], homes[0]]
    champion = tracking.champion(NAME)
    base = quality_of(champion) if champion else 0.5
    qualities = [round(base + draw.uniform(-0.02, 0.08), 8) for _ in pair_homes]
    # most runs take between 10 and 40 s
    kills = [[draw.uniform(2, 30)] if draw.random() < 0.35 else [] for _ in pair_homes]
    delays = [0.0, draw.uniform(0, 3)]
    rolls_back = draw.random() < 0.4
    moment = draw.uniform(3, 15)

    def start(number: int) -> tuple[int, dict[str, Any], str]:
        time.sleep(delays[number])
        return pair_homes[number].run(config, qualities[number], mode == "mutex", kills[number])

    rollback_code = "-"
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(start, number) for number in range(2)]
        if rolls_back:
            time.sleep(moment)
            rollback_code = str(pair_homes[draw.randrange(2)].rekindle("rollback", NAME)[0])

    results = [run.result() for run in runs]
    problems = list[Problem]()
    for quality, (code, result, stderr) in zip(qualities, results, strict=True):
        problems += [("end", text) for text in end_problems(quality, code, result, stderr)]

    for home in homes:
        pods = {name: count for name, count in home.deployments().items() if count}
        if set(pods) - {home.serving()}:
            problems.append(("end", f"{pods} have pods, and {home.serving() or 'nothing'} serves"))

    ends = [f"{result.get('verdict')}, exit code {code}" for code, result, _ in results]
    steps = [step for _, result, _ in results for step in result.get("steps", [])]
    again = sum(step["name"].endswith("-again") and step["phase"] == "Succeeded" for step in steps)
    log = (
        f"{mode}: {qualities} killed {kills} rollback {rollback_code}: {ends}, {again} repeated"
        " evaluations"
    )

    return log, again, problems


def end_problems(quality: float, code: int, result: dict[str, Any], stderr: str) -> list[str]:
    """Return a problem for each contradiction between a run's exit code, its JSON output and its
    record in MLflow."""
    verdict = result.get("verdict")
    if code != {"release": 0, "same": 0, "keep": 3}.get(str(verdict)):
        return [f"{quality}: exit code {code}, verdict {verdict}: {stderr[-600:]}"]

    run_id = tracking.find_run(NAME, result["workflow"])
    assert run_id
    tags = tracking.read_tags(run_id)
    pairs: dict[str, tuple[Any, Any]] = {
        name: (result[name], tags.get(name)) for name in ("verdict", "reason")
    }
    pairs["promoted"] = (verdict == "release", "rekindle.promoted" in tags)

    return [
        f"{quality}: {name} {values}" for name, values in pairs.items() if values[0] != values[1]
    ]


def history_problems(champions: Champions) -> list[Problem]:
    """Return a problem for each wrong promotion: the model was not compared with the champion that
    it replaced, or it is worse than this champion."""
    problems = list[Problem]()
    previous = ""
    releases = {release.version: release for release in tracking.promoted_releases(NAME)}

    for version, by_rollback in champions.changes:
        if not by_rollback:
            record = json.loads(champions.store.get(f"{releases[version].uri}verdict.json"))
            compared = (record["champion"] or {}).get("version", "")
            if record["verdict"] != "release" or compared != previous:
                problems.append(
                    ("promotion", f"{version} replaced {previous}, evaluated against {compared}")
                )

            if previous and quality_of(releases[version]) < quality_of(releases[previous]):
                problems.append(
                    ("verdict", f"{version} is worse than {previous}, which it replaced")
                )

        previous = version

    return problems


def kill_rollbacks(
    home: Home, store: Store, count: int, draw: Random
) -> tuple[list[str], list[float], list[float]]:
    """Kill rollbacks, and repeat them. Return the problems, the durations in seconds of commands
    that were not killed, and the durations of repeated commands."""
    deployments = sorted(home.deployments())
    versions = {each.version: each.deployment for each in tracking.promoted_releases(NAME)}

    targets = [version for version, deployment in versions.items() if deployment in deployments][
        -2:
    ]
    if len(targets) < 2:
        return ["fewer than two releases can be restored"], [], []

    problems = []
    whole = list[float]()
    repeated = list[float]()

    for number in range(2 + count):
        target = targets[number % 2]
        kill_s = draw.uniform(0.2, 3) if number >= 2 else 0
        begin = time.perf_counter()
        code, *_, stderr = home.rekindle("rollback", NAME, target, kill_s=kill_s)
        seconds = whole

        if code == -signal.SIGKILL:
            begin = time.perf_counter()
            seconds = repeated
            code, *_, stderr = home.rekindle("rollback", NAME, target)

        seconds.append(time.perf_counter() - begin)
        champion = tracking.champion(NAME)
        pods = {name for name, count in home.deployments().items() if count}

        end = (
            code,
            champion and champion.version,
            home.serving(),
            pods,
            promotion.read_pending_rollback(store, NAME),
        )
        if end != (0, target, versions[target], {versions[target]}, None):
            problems.append(f"rollback {number}, killed after {kill_s:.2f} s: {end} {stderr}")

    return problems, whole, repeated


def measure(folder: Path, arguments: Any) -> list[Bar]:
    """Run the pairs one after the other, each with two simultaneous pipelines, and then the
    rollbacks."""
    config = folder / "pairs.yaml"
    config.write_text(CONFIG)
    homes = [Home(folder / name, free_port()) for name in ("home-1", "home-2")]
    draw = Random(arguments.seed)
    store = Store.from_env()
    champions = Champions(store)
    problems = list[Problem]()
    count = 0
    repetitions = 0
    end = time.monotonic() + 60 * arguments.minutes

    with champions.watched():
        while count < arguments.pairs and time.monotonic() < end:
            log, again, found = run_pair(homes, config, draw, MODES[count % 3])
            problems = problems + found
            count = count + 1
            repetitions = repetitions + again
            print(f"{count} {log}", *found, sep="\n  PROBLEM ", file=sys.stderr, flush=True)

    found = history_problems(champions)
    problems += found

    print(
        f"{len(champions.changes)} champions",
        *found,
        sep="\n  PROBLEM ",
        file=sys.stderr,
        flush=True,
    )

    failed, whole, repeated = kill_rollbacks(homes[0], store, arguments.rollbacks, draw)

    print(
        f"{len(repeated)} rollbacks killed",
        *failed,
        sep="\n  PROBLEM ",
        file=sys.stderr,
        flush=True,
    )

    for home in homes:
        home.rekindle("down")

    names = (
        "champions worse than the champion before",
        "promotions without an evaluation against the champion",
        "runs with contradictory results",
    )

    bars = [
        bar(f"{name}, in {count} pairs", sum(each == kind for each, _ in problems), "", 0)
        for kind, name in zip(KINDS, names, strict=True)
    ]
    bars.append(bar(f"repeated evaluations, in {count} pairs", repetitions, ""))
    bars.append(bar("runs that were killed and resumed", sum(home.resumed for home in homes), ""))
    bars.append(bar(f"rollbacks with another end, of {arguments.rollbacks}", len(failed), "", 0))
    seconds = {"rollback": whole, "rollback after a killed rollback": repeated}

    return bars + [bar(name, values, "s", 5) for name, values in seconds.items() if values]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--pairs", type=int, default=200, help="maximum number of pairs (default: 200)"
    )
    command.add_argument(
        "--minutes", type=float, default=60, help="time limit for the pairs (default: 60)"
    )
    command.add_argument(
        "--rollbacks", type=int, default=20, help="number of rollbacks to kill (default: 20)"
    )
    command.add_argument(
        "--seed", type=int, default=1, help="seed of all moments and qualities (default: 1)"
    )
    arguments = command.parse_args()

    with tempfile.TemporaryDirectory(prefix="pairs-") as folder:
        services = Services(Path(folder) / "services", {})
        try:
            os.environ.update(services.environment() | services.credentials() | services.login())
            services.ready()
            bars = measure(Path(folder), arguments)
        finally:
            services.down()

    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
