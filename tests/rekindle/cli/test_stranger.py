"""In a folder that a stranger made, a command runs only what its user names, and no home that came with it is used."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import psutil
import pytest

from rekindle.cli import commands
from rekindle.local.services.services import answers
from tests.argolocal.controllers.test_projects import serving
from tests.ports import free_port
from tests.rekindle.cli.stranger import OWN, Folder
from tests.rekindle.cli.test_cli import REKINDLE, workflow, written
from tests.waiting import until

REFUSED = "was not created here by your own commands"
FROM_CONFIG = {f"{name}.py" for name in OWN}  # what a config or a step names
CONFIG = "configs/evil.yaml"
WEEKS = ("--from", "2026-03-01", "--to", "2026-03-31")
# command → what is typed after it, and whether it uses the home, which it must refuse
TYPED: dict[str, list[tuple[tuple[str, ...], bool]]] = {
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
    "lint": [((CONFIG,), False), (("--manifest", "{manifest}"), False)],
    "put": [(("pyproject.toml",), True)],
    "ui": [((), True), (("evil",), True)],
    "get": [(("evil",), True), (("evil", "evil/secret", "--to", "out"), True)],
    "env": [((), True)],
    "cache ls": [((), True)],
    "cache prune": [(("--yes",), True)],
    "images build": [(("train", "--tag", "a:1"), False)],
    "platform render": [((), False), (("--operator",), False)],
    "platform check": [((), False)],
    "submit": [((CONFIG,), False), (("--manifest", "{manifest}", "--dry-run", "-n", "a"), False)],
    "schedule": [((CONFIG,), False)],
    "run-now": [(("evil",), False)],
    "backfill": [((CONFIG, *WEEKS), False)],
    "scale": [(("evil", "2"), True)],
    "unschedule": [(("evil",), False)],
    "delete": [(("evil",), False)],
    "step": [(("steps.evil", "--help"), False)],
    "trust": [((), False), (("pyproject.toml",), False)],  # with .rekindle it would be the user who names it
}


def leaves(group: click.Group, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield prefix + name


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A folder with a home, a project, a git repository, and modules in all of them."""
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
        typed(folder, "down")
    folder.close()


def typed(folder: Folder, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a user of his own types in the folder."""
    user = folder.root.parent / "user"
    user.mkdir(exist_ok=True)
    own = {"HOME": str(user), "KUBECONFIG": str(user / "none"), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))}
    return subprocess.run([REKINDLE, *arguments], cwd=folder.root, env={**inherited, **own, **environment},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)  # fmt: skip


def check_untouched(folder: Folder, done: subprocess.CompletedProcess[str], before: dict[str, bytes]) -> None:
    assert folder.victim.poll() is None, "a process that the home names was ended"
    assert folder.listener.connections == 0, "an address that the home names was asked"
    assert folder.secret.read_text() not in done.stdout + done.stderr, "a link in the home was followed"
    assert folder.content() == before, "the home was changed"
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("command", sorted(leaves(commands)))
def test_a_command_in_a_folder_of_a_stranger_runs_only_what_the_user_names(fetched: Folder, command: str):
    manifest = written(fetched.root.parent / "own.yaml", workflow(("one", "echo one")))
    before = fetched.content()
    for arguments, uses_home in TYPED[command]:
        words = [*command.split(), *(argument.format(manifest=manifest) for argument in arguments)]
        path = {"PATH": str(Path(sys.executable).parent)} if command == "images build" else {}  # without docker
        done = typed(fetched, *words, **path)
        allowed = FROM_CONFIG if CONFIG in arguments or command == "step" else set()
        assert fetched.executed() <= allowed, words
        for mark in fetched.marks.iterdir():
            mark.unlink()
        check_untouched(fetched, done, before)
        said = done.stdout + done.stderr
        assert (REFUSED in said) == uses_home, said
        assert "name: evil" not in done.stdout
        if uses_home and command != "doctor":
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), said


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",), ("status", "--help"), ("no-command",)])
def test_help_and_completion_in_a_folder_of_a_stranger_run_nothing(fetched: Folder, arguments: tuple[str, ...]):
    before = fetched.content()
    words = " ".join(("rekindle", *arguments))
    completion = {"_REKINDLE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(arguments))}
    for environment in ({}, {"_REKINDLE_COMPLETE": "bash_source"}, completion):
        check_untouched(fetched, typed(fetched, *arguments, **environment), before)
        assert fetched.executed() == set()


def test_the_commit_of_a_repository_is_read_without_the_programs_that_it_names(fetched: Folder):
    program = "from rekindle.blocks.manifest.provenance import git_sha; print(git_sha())"
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=fetched.root, capture_output=True, text=True)
    head = (fetched.root / ".git/HEAD").read_text().removeprefix("ref: ").strip()
    assert done.stdout == (fetched.root / ".git" / head).read_text().strip() + "-dirty\n"
    assert fetched.executed() == set()


SERVER = "import http.server as h, os; h.HTTPServer((os.environ['POD_IP'], 8080), h.SimpleHTTPRequestHandler)"
STEP = {"name": "step", "container": {"image": "python", "command": ["python", "-c", "import json, yaml, click"]}}


def records(home: Path) -> list[int]:
    """The pids of the services and of the supervisor."""
    files = [home / "deployments/supervisor.json", home / "services/s3.json", home / "services/mlflow.json"]
    return [json.loads(file.read_text())["pid"] for file in files]


@pytest.mark.slow
def test_what_is_started_in_a_folder_of_a_stranger_imports_nothing_of_it(folder: Folder):
    folder.plant_project()
    manifest = serving("own", free_port(), "python", "-c", f"{SERVER}.serve_forever()")
    manifest["spec"]["templates"][0]["dag"]["tasks"].append({"name": "step", "template": "step"})
    manifest["spec"]["templates"].append(STEP)
    done = typed(folder, "run", "--manifest", written(folder.root.parent / "own.yaml", manifest), "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert typed(folder, "env").returncode == 0
    for place in [folder.home, *(path for path in folder.home.rglob("*") if path.is_dir())]:  # by a `git pull`
        folder.plant_modules(place)
    before = records(folder.home)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until("the killed processes to be gone", lambda: not any(psutil.pid_exists(pid) for pid in before))
    assert typed(folder, "env").returncode == 0
    shown: list[dict] = []

    def everything_runs() -> bool:
        shown[:] = json.loads(typed(folder, "status", "-o", "json").stdout)["serving"]
        return len(shown) == 3 and all(row["running"] and row.get("ready", 1) for row in shown)

    until("everything to run again", everything_runs, evidence=lambda: shown)
    for row in shown:  # what runs may be about to end
        until("it to answer", lambda url=row["address"]: answers(url), evidence=lambda row=row: row)
    assert not set(before) & set(records(folder.home))
    assert typed(folder, "down").returncode == 0
    assert folder.executed() == set()


def test_a_week_of_the_past_imports_nothing_of_the_working_directory(folder: Folder):
    folder.plant_modules(folder.root)
    program = (
        "from pathlib import Path; from rekindle.view.history import backfill; backfill._rekindle(Path('l'), 'resume')"
    )
    subprocess.run([sys.executable, "-P", "-c", program], cwd=folder.root, check=True)
    assert "there is no run that is interrupted" in (folder.root / "l").read_text()
    assert folder.executed() == set()


def test_a_home_is_used_only_where_its_user_made_it_or_trusts_it(folder: Folder):
    assert typed(folder, "put", "../secret").returncode == 0
    copy = folder.root / "copy"
    shutil.copytree(folder.home, copy)
    (folder.root / "link").symlink_to(folder.home)
    done = typed(folder, "down", REKINDLE_HOME="copy")
    assert (done.returncode, REFUSED in done.stderr, "`rekindle trust copy`" in done.stderr) == (2, True, True)
    done = typed(folder, "down", REKINDLE_HOME="link")
    assert (done.returncode, "link is a link, and is not followed" in done.stderr) == (2, True), done.stderr
    assert typed(folder, "trust", "copy").returncode == 0
    assert typed(folder, "down", REKINDLE_HOME="copy").stdout == ""  # what the original started is not the copy's
    assert typed(folder, "down").stdout == "stopped s3\n"


def test_a_home_that_replaced_ones_own_is_not_used(folder: Folder):
    assert typed(folder, "put", "../secret").returncode == 0
    assert typed(folder, "down").returncode == 0
    shutil.rmtree(folder.home)
    folder.plant_home()
    assert REFUSED in typed(folder, "status").stderr
    assert folder.executed() == set()
    shutil.rmtree(folder.home)
    folder.home.mkdir()  # what is empty has nothing to run
    assert typed(folder, "put", "../secret").returncode == 0


def test_a_home_of_another_user_is_not_used(folder: Folder):
    if os.geteuid():
        pytest.skip("needs root")
    assert typed(folder, "put", "../secret").returncode == 0
    assert typed(folder, "down").returncode == 0
    os.chown(folder.home, 65534, -1)
    for arguments in (("status",), ("trust", ".rekindle")):
        done = typed(folder, *arguments)
        assert (done.returncode, ".rekindle belongs to " in done.stderr) == (2, True), done.stderr
    shutil.rmtree(folder.home)


def test_without_a_place_for_the_key_one_sentence_names_the_variable(folder: Folder):
    done = typed(folder, "put", "../secret", XDG_STATE_HOME="/proc/self")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "set XDG_STATE_HOME to a directory of your own" in done.stderr
    state = str(folder.root.parent / "state")
    assert typed(folder, "put", "../secret", XDG_STATE_HOME=state).returncode == 0
    assert typed(folder, "down", XDG_STATE_HOME=state).returncode == 0
