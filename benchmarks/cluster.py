"""What we add on a cluster: from `submit` to the first pod, and the demo's running time beside that of this machine.

    python -m benchmarks.cluster [--json] [--runs 3] [--config configs/demo.yaml]

Needs what tests/cluster/place.py names, and makes a namespace of its own. Argo and the kubelet have the time in which
none of the run's containers runs (or only the model's server, once it is ready). The rest is ours, and by what it
exceeds the same run on this machine we add there: waiting, and slower starts. All times are those at which a watch
hears of something, as Kubernetes' own have whole seconds.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from benchmarks.bars import bar, parser, report
from rekindle.view.summary import timestamp
from tests.cluster.place import made
from tests.cluster.run import DEMO, Place, Run, local

ARGO = "argoexec"  # the executor's own image: what it does is Argo's
IMPORT = "import time; start = time.perf_counter(); import hera.workflows; print(time.perf_counter() - start)"


@dataclass
class Pod:
    """When a pod was first seen, when its first container of ours ran, and when the last one was over or ready."""

    name: str
    seen: float
    began: float | None = None
    over: float | None = None


@contextmanager
def watched(place: Place, kind: str, heard: Any) -> Iterator[None]:
    """Call `heard(object, Unix seconds)` for each event of a kind in the namespace."""
    command = ["kubectl", "--namespace", place.kube.namespace, "get", kind, "--watch", "-o", "json"]
    with subprocess.Popen([*command, "--output-watch-events"], stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            assert process.stdout
            for line in process.stdout:
                heard(json.loads(line)["object"], time.time())

        thread = Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.terminate()
            thread.join()


def see(pods: dict[str, Pod], found: dict[str, Any], now: float) -> None:
    """Note what an event of a pod says."""
    pod = pods.setdefault(found["metadata"]["uid"], Pod(found["metadata"]["name"], now))
    images = {each["name"]: each["image"] for each in found["spec"]["containers"]}
    states = [each for each in found["status"].get("containerStatuses", []) if ARGO not in images[each["name"]]]
    serves = any(found["spec"]["containers"][0].get(probe) for probe in ("readinessProbe", "startupProbe"))
    if pod.began is None and any("waiting" not in each.get("state", {}) for each in states):
        pod.began = now
    over = all(each.get("ready") if serves else "terminated" in each.get("state", {}) for each in states)
    if pod.over is None and states and over:
        pod.over = now


def union(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


@dataclass
class Figures:
    """Seconds of one run."""

    asked: float  # from the command to the workflow
    hera: float  # of these, importing Hera, measured alone
    first: float  # from the workflow to its first pod
    took: float  # from the command to the workflow's end
    ours: float  # of these, with a container of ours at work
    here: float  # the same steps on this machine


def measured(place: Place, config: Path, name: str, home: Path) -> tuple[Figures, list[Pod]]:
    """Run it there, then here; raises SystemExit unless it succeeds."""
    pods: dict[str, Pod] = {}
    workflows: dict[str, float] = {}

    def heard(found: dict[str, Any], now: float) -> None:
        workflows.setdefault(found["metadata"]["name"], now)

    with watched(place, "workflows", heard), watched(place, "pods", lambda *event: see(pods, *event)):
        time.sleep(2)  # until what is there already has been told
        there, start = set(pods), time.time()
        run = Run.submit(place, f"name={name}", config=config)
        if (phase := run.ended()) != "Succeeded":
            raise SystemExit(phase)
        took = time.time() - start
        time.sleep(1)
    own = sorted((pod for uid, pod in pods.items() if uid not in there), key=lambda pod: pod.seen)
    steps = local(home, *place.sets([f"name={name}"]), config=config)["steps"]
    here = union([(timestamp(each["started"]), timestamp(each["finished"])) for each in steps if each["started"]])
    hera = float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True).stdout)
    created = workflows[run.name]
    ours = union([(pod.began, pod.over) for pod in own if pod.began and pod.over])
    return Figures(created - start, hera, own[0].seen - created, took, ours, here), own


def table(pods: list[Pod]) -> str:
    """When each pod was made, how long it took to start, and how long it ran (or until it was ready)."""
    lines = [f"{'pod':44} {'at':>6} {'start':>6} {'ran':>6}  seconds"]
    for pod in pods:
        ran = (pod.began - pod.seen, pod.over - pod.began) if pod.began and pod.over else (0.0, 0.0)
        lines.append(f"{pod.name[:44]:44} {pod.seen - pods[0].seen:6.1f} {ran[0]:6.1f} {ran[1]:6.1f}")
    return "\n".join(lines)


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=3, help="runs (default: 3)")
    command.add_argument("--config", type=Path, default=DEMO, help="what to run (default: configs/demo.yaml)")
    options = command.parse_args()
    runs: list[Figures] = []
    with made() as place, TemporaryDirectory() as home:
        for index in range(options.runs):
            figures, pods = measured(place, options.config, f"waits-{index}", Path(home, str(index)))
            runs.append(figures)
            sys.stderr.write(f"{table(pods)}\n{figures}\n")
    bars = [
        bar("submit to the workflow, Hera's import apart", [each.asked - each.hera for each in runs], "s", 1.0),
        bar("Hera's import", [each.hera for each in runs], "s"),
        bar("the workflow to its first pod: Argo's", [each.first for each in runs], "s"),
        bar("submit to the end", [each.took for each in runs], "s"),
        bar("of it, with a container of ours at work", [each.ours for each in runs], "s"),
        bar("the same steps on this machine", [each.here for each in runs], "s"),
        bar("added by us", [each.ours - each.here for each in runs], "s", 5.0),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
