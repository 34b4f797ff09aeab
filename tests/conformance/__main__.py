"""Run workflows with the local runner and with a real Argo, and print the differences.

    python -m tests.conformance --count 300 --seed 1 --namespace NS [--image python:3.11] \\
      [--at-once 8]
    python -m tests.conformance --namespace NS FOLDER            # compare the manifests of a folder
    # add new manifests to recorded.jsonl
    python -m tests.conformance --namespace NS --record FOLDER

The comparison needs kubectl, a KUBECONFIG, and the environment that argo.py describes. The exit
code is 1 if there is a difference.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.conformance import recorded
from tests.conformance.argo import DEFAULT_IMAGE, Argo
from tests.conformance.differ import (
    Comparison,
    compare_runs,
    random_manifests,
    record,
    reproduce_differences,
)
from tests.conformance.here import LocalRunner


def main() -> int:
    argument_parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=(__doc__ or "").partition("\n")[0]
    )
    argument_parser.add_argument(
        "folder", type=Path, nargs="?", help="manifests to compare instead of random ones"
    )
    argument_parser.add_argument("--count", type=int, default=20)
    argument_parser.add_argument("--seed", type=int, default=1)
    argument_parser.add_argument(
        "--namespace", required=True, help="created if missing, and then deleted at the end"
    )
    argument_parser.add_argument(
        "--image", default=DEFAULT_IMAGE, help="the image to use for python:3.11 on that cluster"
    )
    argument_parser.add_argument(
        "--instance", default="", help="the instanceID of the controller, if it has one"
    )
    argument_parser.add_argument(
        "--at-once", type=int, default=4, help="number of workflows on the cluster at the same time"
    )
    argument_parser.add_argument(
        "--record", action="store_true", help="add each with its outcome on Argo to recorded.jsonl"
    )
    argument_parser.add_argument(
        "--differences", type=Path, default=Path("differences"), help="folder to write them to"
    )

    arguments = argument_parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Argo(arguments.namespace, arguments.image, arguments.instance) as argo,
    ):
        if arguments.record:
            recorded_names = {recording.name for recording in recorded.read()}
            manifests = [
                path
                for path in sorted(arguments.folder.glob("*.yaml"))
                if path.stem not in recorded_names
            ]
            record(manifests, argo, arguments.at_once, print)

            return 0

        if arguments.folder:
            manifests = sorted(arguments.folder.glob("*.yaml"))
        else:
            manifests = []

        manifests = manifests or random_manifests(
            Path(folder), arguments.count, arguments.seed, bool(argo.store)
        )
        with LocalRunner(Path(folder) / "home") as here:
            comparisons = compare_runs(
                manifests,
                here,
                argo,
                arguments.at_once,
                lambda comparison: report_comparison(comparison, arguments.differences),
            )
            differing = [comparison for comparison in comparisons if comparison.differences]
            reproduced_comparisons = reproduce_differences(
                differing, Path(folder), here, argo, arguments.at_once
            )

        print(format_table(comparisons, argo.version))
        print(f"{len(reproduced_comparisons)} differ: {join_names(reproduced_comparisons)}")
        not_reproduced = [
            comparison for comparison in differing if comparison not in reproduced_comparisons
        ]
        print(f"{len(not_reproduced)} differed by chance: {join_names(not_reproduced)}")

        return int(bool(reproduced_comparisons))


def report_comparison(comparison: Comparison, folder: Path) -> None:
    """Print a line of progress; if the outcomes differ, write a folder with the manifest and both
    outcomes."""
    seconds = f"{comparison.seconds:5.1f} s on Argo, {comparison.seconds_here:5.1f} s here"
    print(
        f"{comparison.name:24} {comparison.argo['phase']:10} {seconds} "
        f" {'; '.join(comparison.differences) or 'same'}",
        flush=True,
    )
    if comparison.differences:
        comparison.write(folder / comparison.name)


def join_names(comparisons: Iterable[Comparison]) -> str:
    return ", ".join(comparison.name for comparison in comparisons) or "none"


def format_table(comparisons: list[Comparison], version: str) -> str:
    phases = [
        f"{phase} {sum(comparison.argo['phase'] == phase for comparison in comparisons)}"
        for phase in sorted({comparison.argo["phase"] for comparison in comparisons})
    ]
    nodes = sum(len(comparison.argo.get("nodes", [])) for comparison in comparisons)
    mean = sum(comparison.seconds_here for comparison in comparisons) / max(1, len(comparisons))
    contents_cell = f"{nodes} nodes; {', '.join(phases)}"
    return (
        f"{len(comparisons)} workflows ({contents_cell}) on Argo {version} and here, {mean:.1f} s each"
        " here"
    )


if __name__ == "__main__":
    sys.exit(main())
