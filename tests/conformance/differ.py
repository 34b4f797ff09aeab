"""Workflows run by both, side by side, and compared."""

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

from argolocal.manifest.read import documents
from tests.conformance import recorded
from tests.conformance.argo import Argo
from tests.conformance.here import Here
from tests.conformance.outcome import Outcome, differences, refused
from tests.conformance.workflows import NAME, some

PAUSE = 1.0  # seconds between looks at the cluster
LOCALLY = 1  # runs on this machine at once


class Plain(yaml.SafeDumper):
    """YAML without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@dataclass(frozen=True)
class Compared:
    """A manifest, what both made of it, in seconds, and where they differ."""

    manifest: Path
    mine: Outcome
    argos: Outcome
    differences: list[str]
    seconds_here: float
    seconds: float

    @property
    def name(self) -> str:
        return self.manifest.stem

    def keep(self, folder: Path) -> None:
        """As a folder: the manifest and both outcomes."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.yaml").write_text(self.manifest.read_text())
        (folder / "differences.txt").write_text("\n".join([*self.differences, ""]))
        for who, outcome in (("here", self.mine), ("argo", self.argos)):
            (folder / f"{who}.json").write_text(json.dumps(outcome, indent=1) + "\n")


def written(folder: Path, count: int, seed: int, artifacts: bool) -> list[Path]:
    """Random manifests as files, each with a name of its own."""
    paths = []
    for index, objects in enumerate(some(count, seed, artifacts)):
        path = folder / f"random-{seed}-{index:03d}.yaml"
        path.write_text(yaml.dump_all(objects, Dumper=Plain, sort_keys=False).replace(NAME, path.stem))
        paths.append(path)
    return paths


def compare(
    manifests: Sequence[Path], here: Here, argo: Argo, at_once: int, on_each: Callable[[Compared], None]
) -> list[Compared]:
    """Runs all; `on_each` hears of each that is compared."""
    comparisons: list[Compared] = []

    def timed(path: Path) -> tuple[Outcome, float]:
        since = time.monotonic()
        try:
            return here.run(path, path.stem), time.monotonic() - since
        except (AssertionError, subprocess.TimeoutExpired) as error:  # the runner itself is at fault
            return {"phase": "Broken", "message": str(error), "outputs": {}, "nodes": []}, time.monotonic() - since

    with ThreadPoolExecutor(LOCALLY) as pool:
        mine: dict[Path, Future[tuple[Outcome, float]]] = {}

        def ended(path: Path, argos: Outcome, seconds: float) -> None:
            outcome, seconds_here = mine.pop(path).result()
            comparisons.append(Compared(path, outcome, argos, differences(outcome, argos), seconds_here, seconds))
            on_each(comparisons[-1])

        on_argo(manifests, argo, at_once, lambda path: mine.update({path: pool.submit(timed, path)}), ended)
    return comparisons


def again(comparisons: Sequence[Compared], folder: Path, here: Here, argo: Argo, at_once: int) -> list[Compared]:
    """Those that differ when they are run twice more, under other names, from `folder`: the rest was chance."""
    copies: dict[Path, Compared] = {}
    for comparison in comparisons:
        for letter in "bc":
            path = folder / f"{comparison.name}-{letter}.yaml"
            named = [
                _renamed(document, comparison.name, path.stem)
                for document in documents(comparison.manifest.read_text())
            ]
            path.write_text(yaml.dump_all(named, Dumper=Plain, sort_keys=False))
            copies[path] = comparison
    compared = compare(list(copies), here, argo, at_once, lambda comparison: None)
    alike = [rerun for rerun in compared if not rerun.differences]
    same = [copies[rerun.manifest] for rerun in alike if refused(rerun.argos) == refused(copies[rerun.manifest].argos)]
    return [comparison for comparison in comparisons if comparison not in same]


def _renamed(value: Any, name: str, new: str) -> Any:
    """With another name wherever it is in a value, as a whole word."""
    if isinstance(value, dict):
        return {key: _renamed(item, name, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, name, new) for item in value]
    return re.sub(rf"(?<![\w-]){re.escape(name)}(?!\w)", new, value) if isinstance(value, str) else value


def record(manifests: Sequence[Path], argo: Argo, at_once: int, say: Callable[..., None]) -> None:
    """Adds manifests and their outcomes on Argo to recorded.jsonl."""

    def ended(path: Path, argos: Outcome, seconds: float) -> None:
        recorded.write([*recorded.read(), recorded.Recording(path.stem, path.read_text(), argos)])
        say(f"{path.stem:24} {argos['phase']} {argos.get('message', '')}")

    on_argo(manifests, argo, at_once, lambda path: None, ended)


def on_argo(
    manifests: Sequence[Path],
    argo: Argo,
    at_once: int,
    begun: Callable[[Path], None],
    ended: Callable[[Path, Outcome, float], None],
) -> None:
    """All manifests on the cluster, so many at once."""
    waiting = list(manifests)
    running: dict[str, tuple[Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            path = waiting.pop(0)
            argo.submit(path.stem, path.read_text())
            begun(path)
            running[path.stem] = (path, time.monotonic())
        time.sleep(PAUSE)
        for name, outcome in argo.ended().items():
            path, since = running.pop(name)
            ended(path, outcome, time.monotonic() - since)
