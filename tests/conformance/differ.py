"""Run workflows with the local runner and with Argo, and compare the outcomes."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from argolocal.manifest.read import parse_objects
from tests.conformance import recorded
from tests.conformance.argo import Argo
from tests.conformance.here import LocalRunner
from tests.conformance.outcome import Outcome, is_rejected, list_differences
from tests.conformance.workflows import NAME, random_workflows

# time between polls of the cluster
POLL_S = 1.0
# number of simultaneous runs on this machine
LOCAL_RUNS = 1


class Plain(yaml.SafeDumper):
    """YAML in which no anchors are used."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@dataclass(frozen=True)
class Comparison:
    """A manifest, its outcomes and durations with the local runner and with Argo, and the
    differences of the outcomes."""

    manifest: Path
    mine: Outcome
    argo: Outcome
    differences: list[str]
    seconds_here: float
    seconds: float

    @property
    def name(self) -> str:
        return self.manifest.stem

    def write(self, folder: Path) -> None:
        """Write a folder with the manifest, the outcome of the local runner and the outcome of
        Argo."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.yaml").write_text(self.manifest.read_text())
        (folder / "differences.txt").write_text("\n".join([*self.differences, ""]))
        for who, outcome in (("here", self.mine), ("argo", self.argo)):
            (folder / f"{who}.json").write_text(json.dumps(outcome, indent=1) + "\n")


def random_manifests(folder: Path, count: int, seed: int, artifacts: bool) -> list[Path]:
    """Write random manifests as files, each with a different name."""
    paths = []
    for index, objects in enumerate(random_workflows(count, seed, artifacts)):
        path = folder / f"random-{seed}-{index:03d}.yaml"
        path.write_text(
            yaml.dump_all(objects, Dumper=Plain, sort_keys=False).replace(NAME, path.stem)
        )
        paths.append(path)
    return paths


def compare_runs(
    manifests: Sequence[Path],
    here: LocalRunner,
    argo: Argo,
    at_once: int,
    on_each: Callable[[Comparison], None],
) -> list[Comparison]:
    """Run all manifests with the local runner and with Argo, and return the comparisons. Calls the
    function `on_each` with each comparison."""
    comparisons: list[Comparison] = []

    def run_timed(path: Path) -> tuple[Outcome, float]:
        since = time.monotonic()
        try:
            return here.run(path, path.stem), time.monotonic() - since
        # an exception means a bug of the runner
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return {
                "phase": "Broken",
                "message": str(error),
                "outputs": {},
                "nodes": [],
            }, time.monotonic() - since

    with ThreadPoolExecutor(LOCAL_RUNS) as pool:
        local_outcomes: dict[Path, Future[tuple[Outcome, float]]] = {}

        def on_end(path: Path, argos: Outcome, seconds: float) -> None:
            outcome, seconds_here = local_outcomes.pop(path).result()
            comparisons.append(
                Comparison(
                    path, outcome, argos, list_differences(outcome, argos), seconds_here, seconds
                )
            )
            on_each(comparisons[-1])

        run_on_argo(
            manifests,
            argo,
            at_once,
            lambda path: local_outcomes.update({path: pool.submit(run_timed, path)}),
            on_end,
        )

    return comparisons


def reproduce_differences(
    comparisons: Sequence[Comparison], folder: Path, here: LocalRunner, argo: Argo, at_once: int
) -> list[Comparison]:
    """Return the comparisons whose differences appear again in two more runs under other names; the
    manifests of these runs are written to `folder`."""
    copies: dict[Path, Comparison] = {}

    for comparison in comparisons:
        for letter in "bc":
            path = folder / f"{comparison.name}-{letter}.yaml"
            documents_of_copy = [
                _rename_in_value(document, comparison.name, path.stem)
                for document in parse_objects(comparison.manifest.read_text())
            ]
            path.write_text(yaml.dump_all(documents_of_copy, Dumper=Plain, sort_keys=False))
            copies[path] = comparison

    reruns = compare_runs(list(copies), here, argo, at_once, lambda comparison: None)
    equal_reruns = [rerun for rerun in reruns if not rerun.differences]

    by_chance = [
        copies[rerun.manifest]
        for rerun in equal_reruns
        if is_rejected(rerun.argo) == is_rejected(copies[rerun.manifest].argo)
    ]

    return [comparison for comparison in comparisons if comparison not in by_chance]


def _rename_in_value(value: Any, name: str, new: str) -> Any:
    """Replace a name in a value, as a whole word."""
    if isinstance(value, dict):
        return {key: _rename_in_value(item, name, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_rename_in_value(item, name, new) for item in value]
    if isinstance(value, str):
        return re.sub(rf"(?<![\w-]){re.escape(name)}(?!\w)", new, value)
    return value


def record(manifests: Sequence[Path], argo: Argo, at_once: int, say: Callable[..., None]) -> None:
    """Add manifests and their outcomes on Argo to the file recorded.jsonl."""

    def on_end(path: Path, argos: Outcome, seconds: float) -> None:
        recorded.write([*recorded.read(), recorded.Recording(path.stem, path.read_text(), argos)])
        say(f"{path.stem:24} {argos['phase']} {argos.get('message', '')}")

    run_on_argo(manifests, argo, at_once, lambda path: None, on_end)


def run_on_argo(
    manifests: Sequence[Path],
    argo: Argo,
    at_once: int,
    on_submit: Callable[[Path], None],
    on_end: Callable[[Path, Outcome, float], None],
) -> None:
    """Run all manifests on the cluster, `at_once` at the same time."""
    waiting = list(manifests)
    running: dict[str, tuple[Path, float]] = {}

    while waiting or running:
        while waiting and len(running) < at_once:
            path = waiting.pop(0)
            argo.submit(path.stem, path.read_text())
            on_submit(path)
            running[path.stem] = (path, time.monotonic())

        time.sleep(POLL_S)
        for name, outcome in argo.collect_ended().items():
            path, since = running.pop(name)
            on_end(path, outcome, time.monotonic() - since)
