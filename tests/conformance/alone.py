"""Workflows run by argolocal alone: here an import of torch, MLflow or rekindle fails.

    with Alone(folder) as alone: outcome = alone.run(manifest, "NAME")

One process serves a process of tests, and forks one for each workflow.
"""

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, Self

FORBIDDEN = ("rekindle", "steps", "pipelines", "torch", "mlflow", "boto3", "numpy", "polars", "hera")
ROOT = Path(__file__).parents[2]


class Alone:
    """The serving process. Each workflow has a home of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen([sys.executable, "-P", __file__], text=True, bufsize=1, cwd=ROOT,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=60)

    def run(self, manifest: str, name: str) -> dict[str, Any]:
        """The outcome of a manifest, whose files are of `name`. Fails with the traceback if the runner breaks."""
        assert self.process.stdin and self.process.stdout
        self.count += 1
        self.process.stdin.write(json.dumps([manifest, name, str(self.folder / f"{self.count}")]) + "\n")
        outcome = json.loads(self.process.stdout.readline())
        assert "traceback" not in outcome, outcome["traceback"]
        return outcome


class Forbidding:
    """The first finder of modules: it finds none of FORBIDDEN."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is imported by what needs none of it")


def outcome_of(manifest: str, name: str, home: Path) -> dict[str, Any]:
    """Run a manifest, and say what became of it; one that argolocal refuses is said to be."""
    if name in FORBIDDEN:
        import_module(name)
    import argolocal
    from argolocal.manifest.read import documents, split
    from tests.conformance.outcome import REFUSED, in_store, of_status

    main, beside = split(documents(manifest))
    try:
        outcome = argolocal.run(main, objects=beside, home=home)
    except argolocal.ConfigError as error:
        return {"phase": "Error", "message": f"{REFUSED}: {error}", "outputs": {}, "nodes": []}
    return of_status(name, dict(outcome.status), in_store(outcome.store))


def serve() -> None:
    """Answer each line of stdin by a line."""
    sys.meta_path.insert(0, Forbidding())  # type: ignore[arg-type]
    sys.path.insert(0, str(ROOT))
    import argolocal.api  # noqa: F401 - each fork has it
    import tests.conformance.outcome  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else is an answer
    for line in iter(sys.stdin.readline, ""):
        if not (pid := os.fork()):
            manifest, name, home = json.loads(line)
            try:
                answer = outcome_of(manifest, name, Path(home))
            except BaseException:
                answer = {"traceback": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            os._exit(0)
        if code := os.waitpid(pid, 0)[1]:
            answers.write(json.dumps({"traceback": f"the runner ended with {code}"}) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
