"""Argo's own examples, run by the local runner and by a real Argo: do they end alike?

    git clone --depth 1 --branch v4.1.2 https://github.com/argoproj/argo-workflows
    python -m tests.conformance.examples argo-workflows/examples --namespace NS [--image python:3.11] [--at-once 6]

What the local runner refuses by name is not sent to the cluster. Many examples toss coins or tell the time, so they are
compared by how the whole ends; where more than that differs, the folder --differences has both outcomes.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from argolocal.manifest.read import documents
from rekindle.errors import ConfigError
from tests.conformance.argo import STANDS_FOR, Argo
from tests.conformance.differ import Compared, on_argo
from tests.conformance.here import Here
from tests.conformance.outcome import Outcome, differences, refused

FLOWS = ("Workflow", "CronWorkflow", "WorkflowTemplate", "ClusterWorkflowTemplate")
BESIDE = ("WorkflowTemplate", "ClusterWorkflowTemplate", "ConfigMap", "Secret")
LONG = 60.0  # seconds; what takes longer here waits for somebody (suspend), or is meant to be long
VERSION = "argoproj.io/v1alpha1"
SAY = r"""case "$1" in
echo) if [ $# -gt 2 ]; then echo "$2" > "$3"; else echo "$2"; fi;;
cat) shift; cat "$@";; sleep) sleep "$2";; exit) exit "$2";; "") echo hello argo;; *) exit 64;;
esac"""  # what Argo's own image argosay does with its arguments


def gathered(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each Workflow, named as its file, and what it refers to, wherever in the folder that is."""
    files = {path: list(_read(path)) for path in sorted(folder.rglob("*.yaml"))}
    library = {_name(each): each for found in files.values() for each in found if each["kind"] in BESIDE}
    for path, found in files.items():
        flows = [each for each in found if each["kind"] in ("Workflow", "CronWorkflow")]
        flows = flows or [each for each in found if each["kind"] == "WorkflowTemplate" and _entered(each)]
        for number, flow in enumerate(flows):
            name = re.sub("[^a-z0-9]+", "-", str(path.relative_to(folder).with_suffix("")).lower())[-45:].strip("-")
            name = f"{name}-{number}" if number else name
            needed: dict[str, dict[str, Any]] = {}
            _refer(json.dumps(main := _runs(flow, name)), library, needed)
            yield name, [main, *needed.values()]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        found = documents(path.read_text())
    except ConfigError:
        return
    for each in found:
        if each.get("kind") in {*FLOWS, *BESIDE}:
            each["metadata"] = {k: v for k, v in (each.get("metadata") or {}).items() if k != "namespace"}
            _let_say(each)
            yield each


def _let_say(value: Any) -> None:
    """Argo's own image is in no place where it can be had: a shell stands for it."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _let_say(each)
    if isinstance(value, dict) and re.match(r"argoproj/argosay:", str(value.get("image"))):
        value |= {"image": STANDS_FOR, "command": value.get("command") or ["sh", "-c", SAY, "argosay"]}


def _name(thing: dict[str, Any]) -> str:
    return thing["metadata"].get("name", "")


def _entered(template: dict[str, Any]) -> bool:
    return bool(template["spec"].get("entrypoint"))


def _runs(flow: dict[str, Any], name: str) -> dict[str, Any]:
    """The Workflow that it is, or makes."""
    spec = flow["spec"].get("workflowSpec", flow["spec"])
    meta = {key: value for key, value in flow["metadata"].items() if key in ("labels", "annotations")}
    return {"apiVersion": VERSION, "kind": "Workflow", "metadata": {**meta, "name": name}, "spec": spec}


def _refer(text: str, library: dict[str, Any], needed: dict[str, dict[str, Any]]) -> None:
    for name, thing in library.items():
        if name not in needed and f'"name": "{name}"' in text:
            needed[name] = thing
            _refer(json.dumps(thing), library, needed)


def ran_here(here: Here, path: Path) -> tuple[Outcome, float] | None:
    """What it comes to on this machine, and in how many seconds; None if it would wait for somebody, or for long."""
    since = time.monotonic()
    try:
        return here.run(path, path.stem), time.monotonic() - since
    except AssertionError as error:
        return {"phase": "Broken", "message": str(error)[-500:], "outputs": {}, "nodes": []}, time.monotonic() - since
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.conformance.examples", description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--namespace", required=True)
    options.add_argument("--image", default=STANDS_FOR)
    options.add_argument("--instance", default="")
    options.add_argument("--at-once", type=int, default=6)
    options.add_argument("--only", default="", help="those whose name has this regular expression")
    options.add_argument("--differences", type=Path, default=Path("differences"))
    given = options.parse_args()
    counted: Counter[str] = Counter()

    def said(name: str, verdict: str, text: str) -> None:
        counted[verdict] += 1
        print(f"{name:45} {verdict:12} {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder, Argo(given.namespace, given.image, given.instance) as argo:
        mine: dict[Path, tuple[Outcome, float]] = {}
        with Here(Path(folder) / "home", LONG) as here:
            for name, objects in gathered(given.folder):
                if not re.search(given.only, name):
                    continue
                (path := Path(folder, f"{name}.yaml")).write_text(yaml.safe_dump_all(objects, sort_keys=False))
                if not (ran := ran_here(here, path)):
                    said(name, "waits", f"not over after {here.timeout:g} s")
                elif refused(ran[0]):
                    said(name, "refused", ran[0]["message"][-200:].replace("\n", " "))
                else:
                    mine[path] = ran

        def ended(path: Path, argos: Outcome, seconds: float) -> None:
            outcome, seconds_here = mine[path]
            found = differences(outcome, argos)
            alike = argos["phase"] == outcome["phase"] or (argos["phase"] == "Stuck" and outcome["phase"] == "Error")
            verdict = "differs" if not alike else "phase alike" if found else "same"
            said(path.stem, verdict, f"{argos['phase']} {argos.get('message', '')[:100]}")
            if found:
                Compared(path, outcome, argos, found, seconds_here, seconds).keep(given.differences / path.stem)

        on_argo(list(mine), argo, given.at_once, lambda path: None, ended)
    print(", ".join(f"{verdict}: {number}" for verdict, number in counted.most_common()))
    return int(bool(counted["differs"]))


if __name__ == "__main__":
    sys.exit(main())
