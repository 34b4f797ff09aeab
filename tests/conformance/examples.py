"""Run Argo's own examples with the local runner and with a real Argo, and compare the results.

    git clone --depth 1 --branch v4.1.2 https://github.com/argoproj/argo-workflows
    python -m tests.conformance.examples argo-workflows/examples --namespace NS \\
      [--image python:3.11] [--at-once 6]

Examples that the local runner rejects are not sent to the cluster. Many examples are random or
print the time, so only the phases of their nodes are compared. For other differences, the folder
--differences contains both outcomes.
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

from argolocal.manifest.read import parse_objects
from rekindle.errors import ConfigError
from tests.conformance.argo import DEFAULT_IMAGE, Argo
from tests.conformance.differ import Comparison, run_on_argo
from tests.conformance.here import LocalRunner
from tests.conformance.outcome import Outcome, is_rejected, list_differences

FLOWS = ("Workflow", "CronWorkflow", "WorkflowTemplate", "ClusterWorkflowTemplate")
REFERENCED_KINDS = ("WorkflowTemplate", "ClusterWorkflowTemplate", "ConfigMap", "Secret")
# runs that take longer wait for a user (suspend), or are meant to be long
LOCAL_TIMEOUT_S = 60.0
VERSION = "argoproj.io/v1alpha1"
SAY_SCRIPT = r"""case "$1" in
echo) if [ $# -gt 2 ]; then echo "$2" > "$3"; else echo "$2"; fi;;
cat) shift; cat "$@";; sleep) sleep "$2";; exit) exit "$2";; "") echo hello argo;; *) exit 64;;
esac"""  # a script that behaves like Argo's image argosay


def read_examples(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each Workflow of a folder, named after its file, together with the objects that it
    references."""
    files = {path: list(_read(path)) for path in sorted(folder.rglob("*.yaml"))}

    library = {
        _name_of(item): item
        for objects in files.values()
        for item in objects
        if item["kind"] in REFERENCED_KINDS
    }

    for path, found in files.items():
        flows = [item for item in found if item["kind"] in ("Workflow", "CronWorkflow")]
        flows = flows or [
            item for item in found if item["kind"] == "WorkflowTemplate" and _has_entrypoint(item)
        ]
        for number, flow in enumerate(flows):
            name = re.sub("[^a-z0-9]+", "-", str(path.relative_to(folder).with_suffix("")).lower())[
                -45:
            ].strip("-")
            name = f"{name}-{number}" if number else name
            needed: dict[str, dict[str, Any]] = {}
            _add_referenced(json.dumps(main_workflow := _workflow_of(flow, name)), library, needed)
            yield name, [main_workflow, *needed.values()]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        objects = parse_objects(path.read_text())
    except ConfigError:
        return
    for item in objects:
        if item.get("kind") in {*FLOWS, *REFERENCED_KINDS}:
            item["metadata"] = {
                k: v for k, v in (item.get("metadata") or {}).items() if k != "namespace"
            }
            _replace_argosay(item)
            yield item


def _replace_argosay(value: Any) -> None:
    """Replace Argo's image argosay, which may not be available, by a shell."""
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _replace_argosay(item)
    if isinstance(value, dict) and re.match(r"argoproj/argosay:", str(value.get("image"))):
        value.update(
            {
                "image": DEFAULT_IMAGE,
                "command": value.get("command") or ["sh", "-c", SAY_SCRIPT, "argosay"],
            }
        )


def _name_of(thing: dict[str, Any]) -> str:
    return thing["metadata"].get("name", "")


def _has_entrypoint(template: dict[str, Any]) -> bool:
    return bool(template["spec"].get("entrypoint"))


def _workflow_of(flow: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the Workflow that a Workflow, CronWorkflow or WorkflowTemplate describes."""
    spec = flow["spec"].get("workflowSpec", flow["spec"])
    meta = {
        key: value for key, value in flow["metadata"].items() if key in ("labels", "annotations")
    }
    return {
        "apiVersion": VERSION,
        "kind": "Workflow",
        "metadata": {**meta, "name": name},
        "spec": spec,
    }


def _add_referenced(text: str, library: dict[str, Any], needed: dict[str, dict[str, Any]]) -> None:
    for name, thing in library.items():
        if name not in needed and f'"name": "{name}"' in text:
            needed[name] = thing
            _add_referenced(json.dumps(thing), library, needed)


def run_here(here: LocalRunner, path: Path) -> tuple[Outcome, float] | None:
    """Run a manifest on this machine. Return the outcome of the manifest and its duration in
    seconds, or None after LOCAL_TIMEOUT_S."""
    since = time.monotonic()

    try:
        return here.run(path, path.stem), time.monotonic() - since
    except AssertionError as error:
        return {
            "phase": "Broken",
            "message": str(error)[-500:],
            "outputs": {},
            "nodes": [],
        }, time.monotonic() - since
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    argument_parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.examples", description=__doc__
    )
    argument_parser.add_argument("folder", type=Path)
    argument_parser.add_argument("--namespace", required=True)
    argument_parser.add_argument("--image", default=DEFAULT_IMAGE)
    argument_parser.add_argument("--instance", default="")
    argument_parser.add_argument("--at-once", type=int, default=6)
    argument_parser.add_argument(
        "--only", default="", help="regular expression of the names to run"
    )
    argument_parser.add_argument("--differences", type=Path, default=Path("differences"))
    arguments = argument_parser.parse_args()
    verdicts: Counter[str] = Counter()

    def report(name: str, verdict: str, text: str) -> None:
        verdicts[verdict] += 1
        print(f"{name:45} {verdict:12} {text}", flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        Argo(arguments.namespace, arguments.image, arguments.instance) as argo,
    ):
        local_outcomes: dict[Path, tuple[Outcome, float]] = {}
        with LocalRunner(Path(folder) / "home", LOCAL_TIMEOUT_S) as here:
            for name, objects in read_examples(arguments.folder):
                if not re.search(arguments.only, name):
                    continue

                path = Path(folder, f"{name}.yaml")
                path.write_text(yaml.safe_dump_all(objects, sort_keys=False))

                result = run_here(here, path)
                if not result:
                    report(name, "waits", f"still running after {here.timeout:g} s")
                elif is_rejected(result[0]):
                    report(name, "rejected", result[0]["message"][-200:].replace("\n", " "))
                else:
                    local_outcomes[path] = result

        def on_end(path: Path, argos: Outcome, seconds: float) -> None:
            outcome, seconds_here = local_outcomes[path]
            found_differences = list_differences(outcome, argos)

            is_equal = argos["phase"] == outcome["phase"] or (
                argos["phase"] == "Stuck" and outcome["phase"] == "Error"
            )
            if not is_equal:
                verdict = "differs"
            else:
                verdict = "same phase" if found_differences else "same"

            report(path.stem, verdict, f"{argos['phase']} {argos.get('message', '')[:100]}")
            if found_differences:
                Comparison(path, outcome, argos, found_differences, seconds_here, seconds).write(
                    arguments.differences / path.stem
                )

        run_on_argo(list(local_outcomes), argo, arguments.at_once, lambda path: None, on_end)

    print(", ".join(f"{verdict}: {number}" for verdict, number in verdicts.most_common()))
    return int(bool(verdicts["differs"]))


if __name__ == "__main__":
    sys.exit(main())
