"""Run `rekindle` commands as forks of a process that has imported Rekindle, without starting Python
each time.

    with Prompt(folder, environment) as typed: done = typed("rekindle status -o json")

Tests of imports or signals use tests.commands.shell, which starts a real process for each command.
"""

import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

# modules that nearly every command imports
PRELOADED_MODULES = (
    "boto3",
    "hera.workflows",
    "kubernetes.client",
    "requests",
    "argolocal.validate",
    "argolocal.view.foreground",
    "rekindle.blocks",
    "rekindle.blocks.manifest.render",
    "rekindle.cluster.workflows",
    "rekindle.operations.backfill",
    "rekindle.operations.sweep_trials",
    "rekindle.operations.rollback",
    "rekindle.view.cluster_logs",
    "rekindle.view.cluster_overview",
    "rekindle.view.explain",
    "rekindle.operations.cached_results",
)


class Prompt:
    """`prompt(command)` runs a command and returns its completed process."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = dict(environment)

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", __file__]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)

    def __call__(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = shlex.split(command)
        assert program == "rekindle", command
        return self.run(arguments, self.folder, self.environment | environment)

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, with exactly the given environment variables."""
        assert self.process.stdin
        assert self.process.stdout

        with tempfile.TemporaryDirectory() as outputs:
            stdout_file = Path(outputs, "out")
            stderr_file = Path(outputs, "err")
            files = {"out": str(stdout_file), "err": str(stderr_file)}

            request = {
                "arguments": [*arguments],
                "folder": str(folder),
                "environment": dict(environment),
                **files,
            }

            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            exit_code = int(self.process.stdout.readline())

            return subprocess.CompletedProcess(
                [*arguments], exit_code, stdout_file.read_text(), stderr_file.read_text()
            )


def run(request: dict[str, Any]) -> None:
    """Run a command in this process, and exit."""
    from rekindle.__main__ import main

    null_file = os.open(os.devnull, os.O_RDONLY)

    files = [os.open(request[name], os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
    for target, file in enumerate((null_file, *files)):
        os.dup2(file, target)

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["rekindle", *request["arguments"]]
    exit_code: Any = 1

    try:
        main()
    except SystemExit as exit_request:
        exit_code = exit_request.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code if isinstance(exit_code, int) else 1)


def serve() -> None:
    """Fork a command for each line of stdin, and print the exit code of the command."""
    for name in PRELOADED_MODULES:
        import_module(name)

    # this call loads boto3's description of S3
    import_module("rekindle.storage").Store("any", "http://127.0.0.1:9", "any", "any")
    gc.collect()
    # freeze all objects; otherwise each forked command would copy the memory pages of all loaded
    # modules
    gc.freeze()

    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if not pid:
            run(json.loads(line))

        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
