"""Runs workflows by the local runner and by a real Argo, and says where the two differ.

    python -m tests.conformance --count 300 --seed 1 --namespace NS [--image python:3.11] [--at-once 8]
    python -m tests.conformance --namespace NS FOLDER            # the manifests of a folder
    python -m tests.conformance --namespace NS --record FOLDER   # adds those that it lacks to recorded.jsonl

It needs kubectl and a KUBECONFIG; argo.py says what else. Exit code 1 if there is a difference.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.conformance import recorded
from tests.conformance.argo import STANDS_FOR, Argo
from tests.conformance.differ import Compared, again, compare, record, written
from tests.conformance.here import Here


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=(__doc__ or "").partition("\n")[0]
    )
    options.add_argument("folder", type=Path, nargs="?", help="manifests to compare instead of random ones")
    options.add_argument("--count", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--namespace", required=True, help="made if there is none, and gone at the end then")
    options.add_argument("--image", default=STANDS_FOR, help="what stands for python:3.11 on that cluster")
    options.add_argument("--instance", default="", help="the instanceID of the controller, where it has one")
    options.add_argument("--at-once", type=int, default=4, help="so many workflows on the cluster")
    options.add_argument("--record", action="store_true", help="add each with its outcome on Argo to recorded.jsonl")
    options.add_argument("--differences", type=Path, default=Path("differences"), help="where they are written")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, Argo(given.namespace, given.image, given.instance) as argo:
        if given.record:
            known = {recording.name for recording in recorded.read()}
            manifests = [path for path in sorted(given.folder.glob("*.yaml")) if path.stem not in known]
            record(manifests, argo, given.at_once, print)
            return 0
        manifests = sorted(given.folder.glob("*.yaml")) if given.folder else []
        manifests = manifests or written(Path(folder), given.count, given.seed, bool(argo.store))
        with Here(Path(folder) / "home") as here:
            comparisons = compare(
                manifests, here, argo, given.at_once, lambda comparison: report(comparison, given.differences)
            )
            differing = [comparison for comparison in comparisons if comparison.differences]
            different = again(differing, Path(folder), here, argo, given.at_once)
        print(table(comparisons, argo.version))
        print(f"{len(different)} differ: {names(different)}")
        chance = [comparison for comparison in differing if comparison not in different]
        print(f"{len(chance)} differed by chance: {names(chance)}")
        return int(bool(different))


def report(comparison: Compared, folder: Path) -> None:
    """A line of progress; a difference is kept as a folder: the manifest and both outcomes."""
    seconds = f"{comparison.seconds:5.1f} s on Argo, {comparison.seconds_here:5.1f} s here"
    print(
        f"{comparison.name:24} {comparison.argos['phase']:10} {seconds}  {'; '.join(comparison.differences) or 'same'}",
        flush=True,
    )
    if comparison.differences:
        comparison.keep(folder / comparison.name)


def names(comparisons: Iterable[Compared]) -> str:
    return ", ".join(comparison.name for comparison in comparisons) or "none"


def table(comparisons: list[Compared], version: str) -> str:
    phases = [f"{phase} {sum(comparison.argos['phase'] == phase for comparison in comparisons)}" for phase in
              sorted({comparison.argos["phase"] for comparison in comparisons})]  # fmt: skip
    nodes = sum(len(comparison.argos.get("nodes", [])) for comparison in comparisons)
    mean = sum(comparison.seconds_here for comparison in comparisons) / max(1, len(comparisons))
    what = f"{nodes} nodes; {', '.join(phases)}"
    return f"{len(comparisons)} workflows ({what}) on Argo {version} and here, {mean:.1f} s each here"


if __name__ == "__main__":
    sys.exit(main())
