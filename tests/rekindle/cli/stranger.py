"""Make an untrusted folder: each planted file creates a file in `marks` if it is executed."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from argolocal.common.processes import read_start_ticks

# names of libraries, of standard library modules, and of modules that Python imports by itself
MODULES = (
    *(
        "argparse",
        "asyncio",
        "base64",
        "contextlib",
        "dataclasses",
        "hashlib",
        "json",
        "logging",
        "pathlib",
        "random",
    ),
    *(
        "re",
        "runpy",
        "signal",
        "sitecustomize",
        "socket",
        "subprocess",
        "tempfile",
        "typing",
        "usercustomize",
        "uuid",
    ),
    *(
        "boto3",
        "click",
        "hera",
        "mlflow",
        "numpy",
        "polars",
        "pydantic",
        "rich",
        "starlette",
        "torch",
        "yaml",
    ),
    *(
        "conftest",
        "evil",
        "rekindle/__init__",
        "rekindle/__main__",
        "rekindle/cli/__init__",
        "tomllib",
    ),
)
OWN = ("steps/__init__", "steps/evil", "pipelines/__init__", "pipelines/evil", "pipelines/training")
CONFIG = """
name: evil
pipeline: pipelines.evil
workload: steps.evil
data: {source: simulate://7}
"""


HOOKS = (
    "fsmonitor-watchman",
    "post-checkout",
    "post-index-change",
    "reference-transaction",
    "pre-auto-gc",
)


def run_git(folder: Path, *arguments: str) -> str:
    """Run plain git, which obeys the configuration of the repository, and return its output."""
    identity = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.com",
        "-c",
        "advice.addEmbeddedRepo=false",
    )

    result = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )

    return result.stdout


class Listener:
    """A port that counts its connections."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()


class Folder:
    """An untrusted folder, a process that its files try to end, and a port that they try to connect
    to."""

    def __init__(self, root: Path) -> None:
        self.root = root / "fetched"
        self.marks = root / "marks"
        self.secret = root / "secret"
        self.home = self.root / ".rekindle"
        self.listener = Listener()
        self.victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.marks.mkdir()
        self.root.mkdir()
        self.secret.write_text("the user's own secret\n")

    def close(self) -> None:
        self.listener.socket.close()
        self.victim.send_signal(signal.SIGKILL)
        self.victim.wait()

    def executed(self) -> set[str]:
        """Return the planted files that were executed."""
        return {path.name.replace("!", "/") for path in self.marks.iterdir()}

    def mark_code(self, name: str) -> str:
        """Return Python code that marks the file `name` as executed."""
        mark = str(self.marks / name.replace("/", "!"))
        return f"with open({mark!r}, 'w') as _mark: _mark.write({name!r})\n"

    def mark_command(self, name: str) -> str:
        """Return a shell command that marks the file `name` as executed."""
        return (
            f"echo -n {shlex.quote(name)} > {shlex.quote(str(self.marks / name.replace('/', '!')))}"
        )

    def plant_modules(self, folder: Path, names: tuple[str, ...] = MODULES) -> None:
        """Plant modules that shadow modules of libraries and of Python."""
        for name in names:
            file = folder / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.mark_code(str(file.relative_to(self.root))))

    def plant_project(self) -> None:
        """Plant a project, and files that programs read in their working directory."""
        self.plant_modules(self.root, (*MODULES, *OWN))

        texts = {
            "pyproject.toml": "[tool.rekindle]\n",
            "configs/evil.yaml": CONFIG,
            "configs/demo.yaml": CONFIG,
            "configs/chaos.yaml": CONFIG,
            "configs/platform/accounts.yaml": "kind: ClusterRoleBinding\nmetadata: {name: evil}\n",
            "matplotlibrc": "backend: module://evil\n",
            ".env": (
                f"PYTHONPATH={self.root}\nREKINDLE_HOME={self.root}\nMLFLOW_TRACKING_URI={self.address}\n"
            ),
            ".flaskenv": f"PYTHONPATH={self.root}\nFLASK_APP=evil\n",
            "rekindle.pth": "import evil\n",
        }
        for name, text in texts.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def plant_repository(self) -> None:
        """Make the folder a git repository with a changed file; the repository names a program in
        each place in which git accepts one."""
        kinds = "filter=evil diff=evil merge=evil"
        (self.root / ".gitattributes").write_text(f"* {kinds}\n*.toml {kinds} ident export-subst\n")

        inner_folder = self.root / "inner"
        for folder in (inner_folder, self.root):
            folder.mkdir(exist_ok=True)
            run_git(folder, "init", "-q")
            run_git(folder, "commit", "-q", "--allow-empty", "-m", "first")

        run_git(self.root, "add", "pyproject.toml", ".gitattributes", "inner")
        run_git(self.root, "commit", "-qm", "all")
        (self.root / ".gitmodules").write_text(
            '[submodule "inner"]\n\tpath = inner\n\turl = ext::false\n'
        )

        for folder in (inner_folder, self.root):
            self._plant_git_programs(folder)

        with (self.root / "pyproject.toml").open("a") as file:
            file.write("# changed\n")

    def _plant_git_programs(self, folder: Path) -> None:
        """Let the configuration and the hooks of a repository name programs, also in files that
        they include."""
        names = (
            "core.alternateRefsCommand",
            "core.askPass",
            "core.editor",
            "core.fsmonitor",
            "core.gitProxy",
            "core.pager",
            "core.sshCommand",
            "credential.helper",
            "diff.evil.command",
            "diff.evil.textconv",
            "diff.external",
            "gpg.program",
            "gpg.ssh.program",
            "interactive.diffFilter",
            "merge.evil.driver",
            "pager.status",
            "remote.origin.proxy",
            "remote.origin.receivepack",
            "remote.origin.uploadpack",
            "sequence.editor",
            "submodule.inner.update",
            "uploadpack.packObjectsHook",
            "filter.evil.process",
            "alias.status",
            "alias.rev-parse",
            "trailer.evil.command",
        )

        settings = {name: self.mark_command(f"git {name}") for name in names}
        settings.update(
            {name: f"!{settings[name]}" for name in settings if name.startswith("alias")}
        )

        settings.update(
            {
                f"filter.evil.{name}": f"{self.mark_command('git ' + name)}; cat"
                for name in ("clean", "smudge")
            }
        )

        hooks = folder / "elsewhere"

        settings |= {
            "filter.evil.required": "true",
            "core.hooksPath": str(hooks),
            "core.repositoryFormatVersion": "1",
            "extensions.partialClone": "origin",
            "extensions.worktreeConfig": "true",
            "remote.origin.promisor": "true",
            "remote.origin.url": f"ext::sh -c '{self.mark_command('git ext')}'",
            "protocol.allow": "always",
            "protocol.ext.allow": "always",
            "safe.directory": "*",
            "status.submoduleSummary": "true",
            "diff.ignoreSubmodules": "none",
            "log.showSignature": "true",
            "core.attributesFile": str(folder / ".gitattributes"),
            "include.path": str(folder / ".git/included"),
            "includeIf.gitdir:/.path": str(folder / ".git/included"),
        }

        (folder / ".git/included").write_text(
            f'[core]\nfsmonitor = "{self.mark_command("git include")}"\n'
        )
        shutil.copyfile(folder / ".git/included", folder / ".git/config.worktree")

        for name, value in settings.items():
            subprocess.run(
                ["git", "config", "--file", ".git/config", name, value], cwd=folder, check=True
            )

        for place in (folder / ".git/hooks", hooks):
            place.mkdir(exist_ok=True)
            for hook in HOOKS:
                (place / hook).write_text(f"#!/bin/sh\n{self.mark_command('git ' + hook)}\n")
                (place / hook).chmod(0o755)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    def plant_home(self) -> None:
        """Plant a home (a directory of runs) with files for everything that a home could make this
        machine do."""
        victim = {"pid": self.victim.pid, "since": read_start_ticks(self.victim.pid)}
        program = ["sh", "-c", self.mark_command("Deployment")]
        container = {"name": "main", "image": "any", "command": program}
        labels = {"app": "evil", "app.kubernetes.io/name": "evil"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}

        metadata = {
            "name": "evil",
            "labels": labels,
            "generation": 1,
            "resourceVersion": "1",
            "annotations": {},
        }

        metadata["annotations"] = {"rekindle.dev/version": "1"}

        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": spec,
        }

        ports = [{"port": self.listener.port, "targetPort": 1}]

        service = {
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": ports},
        }

        records = {
            name: {"name": name, "port": self.listener.port, **victim} for name in ("s3", "mlflow")
        }
        keys = {"AWS_ACCESS_KEY_ID": "stranger", "AWS_SECRET_ACCESS_KEY": "stranger"}
        templates = [{"name": "main", "container": container}]

        workflow = {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {**metadata},
            "spec": {"entrypoint": "main", "templates": templates, "onExit": "main"},
        }

        time = "2026-01-01T00:00:00Z"

        node = {
            "id": "evil",
            "name": "evil",
            "displayName": "evil",
            "type": "Pod",
            "phase": "Running",
            "templateName": "main",
            "startedAt": time,
            "children": [],
        }

        entry = {
            "status": {"phase": "Running", "startedAt": time},
            "nodes": {"evil": node},
            "pods": {"evil": [victim["pid"], victim["since"]]},
        }

        texts: dict[str, Any] = {
            "objects/Deployment/evil.json": deployment,
            "objects/Service/evil.json": service,
            "deployments/supervisor.json": victim,
            "services/s3.json": records["s3"],
            "services/mlflow.json": records["mlflow"],
            "services/credentials.json": keys,
            "runs/evil/manifest.yaml": workflow,
            "runs/evil/journal.jsonl": entry,
            "images.yaml": {"any": {"python": str(self.root / "evil.py"), "command": program}},
        }

        for name, content in texts.items():
            file = self.home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content) + "\n")

        (self.home / "notify-url").write_text(self.address)
        (self.home / "runs/evil/logs").mkdir()
        (self.home / "runs/evil/logs/evil.log").symlink_to(self.secret)
        (self.home / "s3/rekindle/evil").mkdir(parents=True)
        (self.home / "s3/rekindle/evil/secret").symlink_to(self.secret)

        for folder in [
            path for path in self.home.rglob("*") if path.is_dir() and not path.is_symlink()
        ]:
            self.plant_modules(folder)

        self.plant_modules(self.home, (*MODULES, *OWN))

    def content(self) -> dict[str, bytes]:
        """Return the content of every file of the home (REKINDLE_HOME)."""
        files = (path for path in self.home.rglob("*") if path.is_file() or path.is_symlink())
        return {
            str(path): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            for path in files
        }


def leaf_commands(group: click.Group, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaf_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name
