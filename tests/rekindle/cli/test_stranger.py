"""In an untrusted folder, a command runs only the files that its user names, and does not use the
home (directory of runs) in the folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rekindle.cli import commands
from rekindle.local.services.services import is_answering
from tests.argolocal.controllers.releases import make_serving_workflow
from tests.ports import free_port
from tests.rekindle.cli.processes import REKINDLE, make_shell_workflow, write_manifest
from tests.rekindle.cli.stranger import OWN, Folder, leaf_commands
from tests.waiting import until

REFUSAL = "was not created here by your own commands"
# named by a config or a step
FROM_CONFIG = {f"{name}.py" for name in OWN}
CONFIG = "configs/evil.yaml"
WEEKS = ("--from", "2026-03-01", "--to", "2026-03-31")
# command → its arguments, and True if it uses the home (directory of runs), and must therefore
# refuse it
ARGUMENTS: dict[str, list[tuple[tuple[str, ...], bool]]] = {
    "init": [(("own",), False)],
    "demo chaos": [(("--steps", "20"), True)],
    "doctor": [((), True), (("--cluster",), False)],
    "run": [((CONFIG,), False), (("--manifest", "{manifest}", "--yes"), True), ((), False)],
    "sweep": [((CONFIG,), False), (("--of", "evil"), True)],
    "resume": [((), True), (("evil",), True)],
    "status": [((), True), (("evil",), True), (("-o", "json"), True), (("--cluster",), False)],
    "logs": [((), True), (("evil",), True), (("-f",), True)],
    "explain": [((), True), (("evil",), True)],
    "stop": [((), True), (("evil",), True)],
    "down": [((), True)],
    "rollback": [(("evil",), True), (("evil", "1"), True), (("evil", "--cluster"), False)],
    "prune": [((), True), (("--keep-runs", "0", "--yes"), True)],
    "config": [((CONFIG,), False)],
    "render": [((CONFIG,), False)],
    "check": [((CONFIG,), False)],
    "lint": [((CONFIG,), False), (("--manifest", "{manifest}"), False)],
    "plan": [((CONFIG,), False), (("--manifest", "{manifest}"), True)],
    "put": [(("pyproject.toml",), True)],
    "ui": [(("--mlflow",), True), (("evil", "--mlflow"), True)],
    "server": [((), True), (("--print-unit", "user"), True)],
    "rerun": [((), False), (("evil",), True)],
    "get": [(("evil",), True), (("evil", "evil/secret", "--to", "out"), True)],
    "env": [((), True)],
    "cache ls": [((), True)],
    "cache prune": [(("--yes",), True)],
    "reproduce": [(("evil",), True)],
    "images build": [(("train", "--tag", "a:1"), False)],
    "platform render": [((), False), (("--operator",), False)],
    "platform check": [((), False)],
    "submit": [((CONFIG,), False), (("--manifest", "{manifest}", "--dry-run", "-n", "a"), False)],
    "schedule": [((CONFIG,), False), (("list",), True)],
    "run-now": [(("evil",), False), (("evil", "--local"), True)],
    "backfill": [((CONFIG, *WEEKS), False)],
    "scale": [(("evil", "2"), True)],
    "unschedule": [(("evil",), False), (("evil", "--local"), True)],
    "delete": [(("evil",), False)],
    "step": [(("steps.evil", "--help"), False)],
    # `trust .rekindle` is left out, because it would be the decision of the user
    "trust": [((), False), (("pyproject.toml",), False)],
}
# one command for each way of using a folder; the other commands are tested by `make test-slow`
FAST_COMMANDS = {"run", "status", "config", "step", "trust", "submit"}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """An untrusted folder with a home, a project, a git repository, each of which contains
    modules."""
    folder = Folder(tmp_path_factory.mktemp("stranger"))
    folder.plant_project()
    folder.plant_repository()
    folder.plant_home()
    yield folder
    folder.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """An empty folder for a project or a home."""
    folder = Folder(tmp_path)
    yield folder
    if folder.home.is_dir():
        run_rekindle(folder, "down")
    folder.close()


def run_rekindle(
    folder: Folder, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `rekindle` in the folder, as a user with an empty home directory."""
    user = folder.root.parent / "user"
    user.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    personal = {"HOME": str(user), "KUBECONFIG": str(user / "none"), "PATH": path}
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))
    }

    return subprocess.run(
        [REKINDLE, *arguments],
        cwd=folder.root,
        env={**inherited, **personal, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_untouched(
    folder: Folder, done: subprocess.CompletedProcess[str], original: dict[str, bytes]
) -> None:
    assert folder.victim.poll() is None, "a process named by the home was ended"
    assert folder.listener.connections == 0, "an address named by the home was contacted"
    assert folder.secret.read_text() not in done.stdout + done.stderr, (
        "a link in the home was followed"
    )
    assert folder.content() == original, "the home was changed"
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        name if name in FAST_COMMANDS else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(leaf_commands(commands))
    ],
)
def test_a_command_in_an_untrusted_folder_runs_only_named_files(fetched: Folder, command: str):
    manifest = write_manifest(
        fetched.root.parent / "own.yaml", make_shell_workflow(("one", "echo one"))
    )
    original = fetched.content()

    for arguments, uses_home in ARGUMENTS[command]:
        words = [*command.split(), *(argument.format(manifest=manifest) for argument in arguments)]
        # without docker
        if command == "images build":
            path = {"PATH": str(Path(sys.executable).parent)}
        else:
            path = {}

        result = run_rekindle(fetched, *words, **path)
        if CONFIG in arguments or command == "step":
            allowed = FROM_CONFIG
        else:
            allowed = set()

        assert fetched.executed() <= allowed, words
        for mark in fetched.marks.iterdir():
            mark.unlink()

        check_untouched(fetched, result, original)
        output = result.stdout + result.stderr
        assert (REFUSAL in output) == uses_home, output
        assert "name: evil" not in result.stdout

        if uses_home and command != "doctor":
            assert result.returncode == 2, output
            assert result.stderr.count("\n") == 1, output


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("--version",), ("status", "--help"), ("no-command",)]
)
def test_help_and_completion_in_an_untrusted_folder_run_no_file(
    fetched: Folder, arguments: tuple[str, ...]
):
    original = fetched.content()
    words = " ".join(("rekindle", *arguments))
    completion = {
        "_REKINDLE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(arguments)),
    }
    for environment in ({}, {"_REKINDLE_COMPLETE": "bash_source"}, completion):
        check_untouched(fetched, run_rekindle(fetched, *arguments, **environment), original)
        assert fetched.executed() == set()


def test_reading_the_commit_runs_no_program_of_the_repository(fetched: Folder):
    program = "from rekindle.blocks.manifest.provenance import read_git_sha; print(read_git_sha())"
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=fetched.root, capture_output=True, text=True
    )
    head = (fetched.root / ".git/HEAD").read_text().removeprefix("ref: ").strip()
    assert result.stdout == (fetched.root / ".git" / head).read_text().strip() + "-dirty\n"
    assert fetched.executed() == set()


SERVER = (
    "import http.server as h, os; h.HTTPServer((os.environ['POD_IP'], 8080),"
    " h.SimpleHTTPRequestHandler)"
)
STEP = {
    "name": "step",
    "container": {"image": "python", "command": ["python", "-c", "import json, yaml, click"]},
}


def recorded_pids(home: Path) -> list[int]:
    """Return the pids of the supervisor and the services."""
    files = [
        home / "deployments/supervisor.json",
        home / "services/s3.json",
        home / "services/mlflow.json",
    ]
    return [json.loads(file.read_text())["pid"] for file in files]


@pytest.mark.slow
def test_services_started_in_an_untrusted_folder_import_no_file_of_it(folder: Folder):
    folder.plant_project()
    manifest = make_serving_workflow(
        "own", free_port(), "python", "-c", f"{SERVER}.serve_forever()"
    )
    manifest["spec"]["templates"][0]["dag"]["tasks"].append({"name": "step", "template": "step"})
    manifest["spec"]["templates"].append(STEP)

    result = run_rekindle(
        folder,
        "run",
        "--manifest",
        write_manifest(folder.root.parent / "own.yaml", manifest),
        "--yes",
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert run_rekindle(folder, "env").returncode == 0

    directories = [folder.home, *(path for path in folder.home.rglob("*") if path.is_dir())]
    for directory in directories:  # plant the modules in each folder, as a `git pull` could
        folder.plant_modules(directory)

    killed_pids = recorded_pids(folder.home)
    for pid in killed_pids:
        os.kill(pid, signal.SIGKILL)

    until(
        "the killed processes to be gone",
        lambda: not any(psutil.pid_exists(pid) for pid in killed_pids),
    )
    assert run_rekindle(folder, "env").returncode == 0
    shown: list[dict] = []

    def all_are_running() -> bool:
        shown[:] = json.loads(run_rekindle(folder, "status", "-o", "json").stdout)["serving"]
        return len(shown) == 3 and all(row["running"] and row.get("ready", 1) for row in shown)

    until("all services to run again", all_are_running, evidence=lambda: shown)
    for row in shown:  # a process that is running may still not answer, or may be about to end
        until(
            "it to answer",
            lambda url=row["address"]: is_answering(url),
            evidence=lambda row=row: row,
        )

    assert not set(killed_pids) & set(recorded_pids(folder.home))
    assert run_rekindle(folder, "down").returncode == 0
    assert folder.executed() == set()


def test_a_backfill_imports_no_file_of_the_working_directory(folder: Folder):
    folder.plant_modules(folder.root)
    program = (
        "from pathlib import Path; from rekindle.operations import backfill;"
        " backfill._run_rekindle(Path('l'), 'resume')"
    )
    subprocess.run([sys.executable, "-P", "-c", program], cwd=folder.root, check=True)
    assert "there is no run that is interrupted" in (folder.root / "l").read_text()
    assert folder.executed() == set()


@pytest.mark.slow
def test_only_own_and_trusted_homes_are_used(folder: Folder):
    assert run_rekindle(folder, "put", "../secret").returncode == 0
    copy = folder.root / "copy"
    shutil.copytree(folder.home, copy)
    (folder.root / "link").symlink_to(folder.home)
    result = run_rekindle(folder, "down", REKINDLE_HOME="copy")

    assert result.returncode == 2
    assert REFUSAL in result.stderr
    assert "`rekindle trust copy`" in result.stderr

    result = run_rekindle(folder, "down", REKINDLE_HOME="link")
    assert result.returncode == 2, result.stderr
    assert "link is a link, and is not followed" in result.stderr, result.stderr
    assert run_rekindle(folder, "trust", "copy").returncode == 0
    # a copy of the home stops no services, because the services belong to the original home
    assert run_rekindle(folder, "down", REKINDLE_HOME="copy").stdout == ""
    assert run_rekindle(folder, "down").stdout == "stopped s3\n"


@pytest.mark.slow
def test_a_replaced_home_is_not_used(folder: Folder):
    assert run_rekindle(folder, "put", "../secret").returncode == 0
    assert run_rekindle(folder, "down").returncode == 0
    shutil.rmtree(folder.home)
    folder.plant_home()
    assert REFUSAL in run_rekindle(folder, "status").stderr
    assert folder.executed() == set()
    shutil.rmtree(folder.home)
    # an empty home is used, because it cannot do any harm
    folder.home.mkdir()
    assert run_rekindle(folder, "put", "../secret").returncode == 0


@pytest.mark.slow
def test_a_home_of_another_user_is_not_used(folder: Folder):
    if os.geteuid():
        pytest.skip("needs root")
    assert run_rekindle(folder, "put", "../secret").returncode == 0
    assert run_rekindle(folder, "down").returncode == 0
    os.chown(folder.home, 65534, -1)
    for arguments in (("status",), ("trust", ".rekindle")):
        result = run_rekindle(folder, *arguments)
        assert result.returncode == 2, result.stderr
        assert ".rekindle belongs to " in result.stderr, result.stderr
    shutil.rmtree(folder.home)


@pytest.mark.slow
def test_a_missing_state_directory_is_an_error_that_names_the_variable(folder: Folder):
    result = run_rekindle(folder, "put", "../secret", XDG_STATE_HOME="/proc/self")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "set XDG_STATE_HOME to a directory of your own" in result.stderr
    state = str(folder.root.parent / "state")
    assert run_rekindle(folder, "put", "../secret", XDG_STATE_HOME=state).returncode == 0
    assert run_rekindle(folder, "down", XDG_STATE_HOME=state).returncode == 0
