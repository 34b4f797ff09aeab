"""Tests of each command and each flag of the real program `argo` with `argolocal server`.

The tested `argo` is the program in the environment variable ARGO_CLI, or `argo` on the PATH.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import yaml

from tests.argolocal.server.api import running
from tests.argolocal.server.api.argo_cases import (
    CASES,
    DIFFERS,
    IGNORED,
    REFUSED,
    WORKS,
    Case,
    make_table,
)
from tests.argolocal.server.api.running import ApiServer, Document, start_api

ARGO = os.environ.get("ARGO_CLI") or shutil.which("argo")
needs_argo = pytest.mark.skipif(not ARGO, reason="the command argo is not installed")
# flags of all commands, and commands with flags that are not for workflows of a server
GLOBAL_FLAGS = {"--help"}
# 90 % of the flags of these commands must work with `argolocal server`
COUNTED_COMMANDS = (
    *("submit", "list", "get", "logs", "watch", "wait", "retry", "resubmit", "stop", "terminate"),
    *("suspend", "resume", "delete", "lint", "template", "cron", "cluster-template"),
)
# commands that need no server, or need Kubernetes
OTHER_COMMANDS = {"completion", "convert", "executor-plugin", "help", "server"}
ROOT = Path(__file__).parents[4]
numbers = count()


def run_argo(arguments: list[str], environ: dict[str, str]) -> str:
    """Run `argo` and return its output, without colours."""
    assert ARGO
    ended = subprocess.run(
        [ARGO, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", ended.stdout + ended.stderr)


class Terminal:
    """A terminal in which `argo` uses a server."""

    def __init__(self, server: ApiServer, files: Path) -> None:
        self.server = server
        self.files = files
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(files),
            "KUBECONFIG": "/dev/null",
            "ARGO_SERVER": f"127.0.0.1:{server.port}",
            "ARGO_HTTP1": "true",
            "ARGO_SECURE": "false",
            "ARGO_NAMESPACE": "argo",
            "ARGO_TOKEN": f"Bearer {server.token}",
        }

    def run(self, line: str) -> str:
        return run_argo(shlex.split(line), self.environ)

    def make(self, placeholder: str) -> str:
        """Return the value of a placeholder in a command line, such as {done}, and create the
        objects that it needs."""
        name = f"{placeholder}-{next(numbers)}"
        match placeholder:
            case "done":
                return "done"
            case "copied":
                return self._copy()
            case "failed":
                self._submit(running.make_failing_workflow(name))
                self.server.wait(name)
            case "uid":
                self._submit(running.make_failing_workflow(name))
                return self.server.wait(name)["metadata"]["uid"]
            case "gated":
                self._submit(running.make_gated_workflow(name))
                self.server.wait_until_suspended(name)
            case "long":
                self._submit(running.make_long_workflow(name))
                self.server.wait(name, "Running")
            case "fresh":
                self._write_files(name)
            case "files":
                return str(self.files)
            case _:
                return f"{{{placeholder}}}"
        return name

    def _submit(self, manifest: Document) -> None:
        manifest["metadata"]["labels"] = {"name": manifest["metadata"]["name"]}
        self.server.submit(manifest)

    def _copy(self) -> str:
        copied = self.server.change("PUT", "/workflows/argo/done/resubmit")
        return copied["metadata"]["name"]

    def _write_files(self, name: str) -> None:
        """Write the objects that have a new name, as files."""
        for kind, manifest in stored_objects(name).items():
            (self.files / f"{name}.{kind}.yaml").write_text(yaml.safe_dump(manifest))


def stored_objects(name: str) -> dict[str, Document]:
    return {
        "template": running.make_stored_template(name),
        "cluster-template": running.make_stored_template(name, "ClusterWorkflowTemplate"),
        "cron": running.make_cron_workflow(name),
    }


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("argo")
    # suspended workflows keep their places in the queue
    with start_api(folder / "home", parallelism=500) as server:
        terminal = Terminal(server, folder)
        write_files(folder)
        done = running.make_hello_workflow("done")
        done["metadata"]["labels"] = {"kind": "done", "name": "done"}
        server.submit(done)
        server.wait("done")
        yield terminal


@pytest.fixture
def stored(terminal: Terminal) -> None:
    """The objects with the name `stored`."""
    addresses = {
        "template": ("/workflow-templates/argo", "template"),
        "cluster-template": ("/cluster-workflow-templates", "template"),
        "cron": ("/cron-workflows/argo", "cronWorkflow"),
    }
    for kind, manifest in stored_objects("stored").items():
        path, field = addresses[kind]
        terminal.server.send("POST", path, {field: manifest})


def write_files(folder: Path) -> None:
    unknown = running.make_hello_workflow()
    unknown["spec"]["entripoint"] = "main"
    invalid_workflow = running.make_hello_workflow()
    invalid_workflow["spec"]["entrypoint"] = "nothing"
    entrypoints = running.make_api_workflow(
        running.make_step_template("main", "true"),
        running.make_step_template("bad", "exit 1"),
        parallelism=1,
    )
    manifests = {
        "hello": running.make_hello_workflow(),
        "unknown-field": unknown,
        "broken": invalid_workflow,
        "entrypoints": entrypoints,
        "parameters": {"message": "of a file"},
    }
    for kind, manifest in stored_objects("stored").items():
        manifests[f"stored.{kind}"] = manifest
        spec = {**manifest["spec"], "entripoint": "main"}
        manifests[f"unknown-field.{kind}"] = {**manifest, "spec": spec}
    for name, manifest in manifests.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(manifest))


def name_case(case: Case) -> str:
    return f"{case.command} {case.flag}".strip()


@needs_argo
@pytest.mark.fast_cases(25)
@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_a_command_line_of_argo_has_its_effect(
    terminal: Terminal, stored: None, case: Case
) -> None:
    values: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            values[name] = terminal.make(name)
        return values[name]

    texts = [
        re.sub(r"\{([a-zA-Z]+)\}", replace, text)
        for text in (case.line, case.expect, case.then, case.then_expect)
    ]
    line, expected, then, then_expected = texts
    output = terminal.run(line)
    assert re.search(expected, output.strip(), re.DOTALL), output
    if then:
        output = terminal.run(then)
        assert re.search(then_expected, output.strip(), re.DOTALL), output


def list_flags(command: str) -> set[str]:
    """Return the flags in the help of a command of `argo`, without the global flags."""
    text = run_argo([*command.split(), "--help"], {"PATH": os.environ["PATH"], "HOME": "/nowhere"})
    own_part = text.partition("\nFlags:\n")[2].partition("\nGlobal Flags:")[0]
    return set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", own_part, re.MULTILINE)) - GLOBAL_FLAGS


def list_commands(command: str = "") -> list[str]:
    """Return the commands in the help of `argo`, or the subcommands of a command."""
    arguments = [*command.split(), "--help"]
    text = run_argo(arguments, {"PATH": os.environ["PATH"], "HOME": "/nowhere"})
    part = text.partition("\nAvailable Commands:\n")[2].partition("\n\n")[0]
    names = re.findall(r"^  ([\w-]+)", part, re.MULTILINE)
    if not names:
        return [command]
    return [
        below
        for name in names
        if name not in OTHER_COMMANDS
        for below in list_commands(f"{command} {name}".strip())
    ]


@needs_argo
def test_each_command_and_flag_of_argo_has_a_case() -> None:
    expected = {
        (command, flag)
        for command in list_commands()
        for flag in ["", *list_flags(command)]
        if not command.startswith(("sync", "cron backfill")) or not flag
    }
    assert expected == {(case.command, case.flag) for case in CASES}


def test_most_flags_work() -> None:
    counted = [case for case in CASES if case.flag and case.command.split()[0] in COUNTED_COMMANDS]
    works = [case for case in counted if case.outcome == WORKS]
    assert len(works) >= 0.9 * len(counted)
    assert all(case.note for case in CASES if case.outcome in (DIFFERS, REFUSED))
    assert {case.outcome for case in counted} <= {WORKS, IGNORED, DIFFERS}


def test_the_page_has_the_table_of_these_cases() -> None:
    """`python -m tests.argolocal.server.api.argo_cases` prints the table."""
    assert make_table() in (ROOT / "docs/argo-server.md").read_text()
