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
            found = compare(manifests, here, argo, given.at_once, lambda one: told(one, given.differences))
            once = [one for one in found if one.differences]
            different = again(once, Path(folder), here, argo, given.at_once)
        print(table(found, argo.version))
        print(f"{len(different)} differ: {names(different)}")
        print(f"{len(once) - len(different)} differed by chance: {names(one for one in once if one not in different)}")
        return int(bool(different))


def told(one: Compared, folder: Path) -> None:
    """A line of progress; a difference is kept as a folder: the manifest and both outcomes."""
    seconds = f"{one.seconds:5.1f} s on Argo, {one.seconds_here:5.1f} s here"
    print(f"{one.name:24} {one.argos['phase']:10} {seconds}  {'; '.join(one.differences) or 'same'}", flush=True)
    if one.differences:
        one.keep(folder / one.name)


def names(found: Iterable[Compared]) -> str:
    return ", ".join(one.name for one in found) or "none"


def table(found: list[Compared], version: str) -> str:
    phases = [f"{phase} {sum(one.argos['phase'] == phase for one in found)}" for phase in
              sorted({one.argos["phase"] for one in found})]  # fmt: skip
    nodes = sum(len(one.argos.get("nodes", [])) for one in found)
    mean = sum(one.seconds_here for one in found) / max(1, len(found))
    what = f"{nodes} nodes; {', '.join(phases)}"
    return f"{len(found)} workflows ({what}) on Argo {version} and here, {mean:.1f} s each here"


if __name__ == "__main__":
    sys.exit(main())
