"""Run workflows with argolocal alone, in a process in which imports of torch, MLflow or rekindle
fail.

    with Alone(folder) as alone: outcome = alone.run(manifest, "NAME")

Each test process has one server process, which forks a process for each workflow.
"""

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, Self

FORBIDDEN = (
    "rekindle",
    "steps",
    "pipelines",
    "torch",
    "mlflow",
    "boto3",
    "numpy",
    "polars",
    "hera",
)
ROOT = Path(__file__).parents[2]


class RunnerProcess:
    """The server process that forks a process for each workflow. Each workflow has its own home
    (directory of runs) below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            text=True,
            bufsize=1,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=60)

    def run(self, manifest: str, name: str) -> dict[str, Any]:
        """Run a manifest named `name` and return its outcome. The test fails with the traceback if
        the runner raises an unexpected exception."""
        assert self.process.stdin
        assert self.process.stdout
        self.count += 1
        self.process.stdin.write(
            json.dumps([manifest, name, str(self.folder / f"{self.count}")]) + "\n"
        )
        outcome = json.loads(self.process.stdout.readline())
        assert "traceback" not in outcome, outcome["traceback"]
        return outcome


class ForbiddingFinder:
    """A module finder that rejects FORBIDDEN modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} must not be imported by argolocal")


def outcome_of(manifest: str, name: str, home: Path) -> dict[str, Any]:
    """Run a manifest and return its outcome, also if argolocal rejects it."""
    if name in FORBIDDEN:
        import_module(name)

    import argolocal
    from argolocal.manifest.read import parse_objects, split_main_object
    from tests.conformance.outcome import REJECTED_PREFIX, in_store, of_status

    workflow, other_objects = split_main_object(parse_objects(manifest))

    try:
        outcome = argolocal.run(workflow, objects=other_objects, home=home)
    except argolocal.ConfigError as error:
        return {
            "phase": "Error",
            "message": f"{REJECTED_PREFIX}: {error}",
            "outputs": {},
            "nodes": [],
        }

    return of_status(name, dict(outcome.status), in_store(outcome.store))


def serve() -> None:
    """Run the workflow that each line of stdin names, and answer each line with a line that
    contains the outcome."""
    sys.meta_path.insert(0, ForbiddingFinder())  # type: ignore[arg-type]
    sys.path.insert(0, str(ROOT))
    import argolocal.api  # noqa: F401 - imported once for all forks
    import tests.conformance.outcome  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    # print other output to stderr, so that it is not mixed with the answers
    os.dup2(2, 1)

    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if not pid:
            manifest, name, home = json.loads(line)
            try:
                answer = outcome_of(manifest, name, Path(home))
            except BaseException:
                answer = {"traceback": traceback.format_exc()}

            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            os._exit(0)

        code = os.waitpid(pid, 0)[1]
        if code:
            answers.write(json.dumps({"traceback": f"the runner ended with {code}"}) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
