"""Interrupt real releases, resume their runs, and check that the result is the same as without
interruption.

python -m tests.rekindle.serving.interrupted.releases 17            one seed
python -m tests.rekindle.serving.interrupted.releases --count 20    seeds 0..19

Each seed releases another version of a model without training, on this machine. The seed determines
the number and the moments of the interruptions, and whether another release takes place before the
run is resumed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Self

from rekindle import tracking
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import Services
from rekindle.storage import Store
from tests.commands import Shell, open_shell
from tests.proxy import Proxy
from tests.rekindle.serving.interrupted.disturbance import Disturbance, Moment
from tests.waiting import until

INSTANCE = "app.kubernetes.io/instance"
VERSION = "rekindle.dev/version"
KEEP_RELEASES = 3  # serve.keep_releases
PROJECT = Path(__file__).parent / "project"


class Project:
    """A project on this machine whose object store and MLflow are behind proxies."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        shutil.copytree(PROJECT, folder)
        self.model = f"tiny-{uuid.uuid4().hex[:6]}"
        config = folder / "tiny.yaml"
        config.write_text(config.read_text().replace("name: tiny", f"name: {self.model}"))
        self.folder = folder
        self.environment = dict(environment)
        self.proxies = {
            name: Proxy(environment[name]) for name in ("S3_ENDPOINT_URL", "MLFLOW_TRACKING_URI")
        }

        self.settings = {
            name: value
            for name, value in environment.items()
            if name.startswith(("AWS_", "MLFLOW_", "S3_"))
        }

        self.settings.update({name: proxy.url for name, proxy in self.proxies.items()})
        self.cluster = LocalCluster(folder / ".rekindle")
        self.kinds = self.cluster.kinds.controllers(self.cluster, self.cluster.home / "run")
        # number of changes of an undisturbed release
        self.changes = 0

    def __enter__(self) -> Self:
        for proxy in self.proxies.values():
            proxy.__enter__()
        self.opened = open_shell(self.folder, **self.settings)
        self.shell: Shell = self.opened.__enter__()
        self.shell.environ = {**self.shell.environ, **self.settings}
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)
        for proxy in self.proxies.values():
            proxy.__exit__()

    def type(self, *command: str, moment: Moment | None = None) -> tuple[int, str, Disturbance]:
        """Run a rekindle command, and return the command's exit code, its output, and the changes
        that it made."""
        disturbance = Disturbance(moment)
        over = threading.Event()

        for proxy in self.proxies.values():
            disturbance.watch(proxy, brief=True)

        objects = threading.Thread(
            target=disturbance.watch_files, args=(self.cluster.home / "objects", over)
        )
        objects.start()
        arguments = [sys.executable, "-m", "rekindle", *command]
        code, stdout, stderr = disturbance.run(arguments, self.folder, self.shell.environ)
        over.set()
        objects.join()

        return code, stdout + stderr, disturbance

    def release(self, *moments: Moment, newer: bool = False) -> tuple[list[str], str, list[str]]:
        """Run the pipeline, and resume the run after each interruption. Return a log, the run whose
        model should be deployed, and the problems."""
        code, out, seen = self.type("run", "tiny.yaml", moment=moments[0] if moments else None)
        self.changes = len(seen.changes) if not moments else self.changes
        runs = (folder for folder in (self.cluster.home / "runs").iterdir() if folder.is_dir())
        name = max(runs, key=lambda folder: folder.stat().st_ctime_ns).name
        log = [f"{(*moments, 'undisturbed')[0]} ({(seen.changes or ['-'])[-1]}): {code}"]
        serving_run = name

        if newer:
            newer_log, serving_run, problems = self.release()
            log.append(f"newer {newer_log}")
            if problems:
                return log, serving_run, problems

        for moment in [*moments[1:], None, None, None]:
            if code == 0 or self.phase(name) == "Succeeded" or (newer and "is not promoted" in out):
                return log, serving_run, []

            code, out, seen = self.type("resume", name, moment=moment)
            log.append(f"{moment or 'undisturbed'} ({(seen.changes or ['-'])[-1]}): {code}")

        return log, serving_run, [f"not resumed: {out}"]

    def phase(self, name: str) -> str:
        result = self.shell(f"rekindle status {name} -o json")
        if result.returncode == 0:
            return json.loads(result.stdout)["phase"]
        return ""

    def problems(self, run: str) -> list[str]:
        """Return the differences from the state after an undisturbed release by `run`."""
        champion = tracking.champion(self.model)
        store = Store.from_env()
        state = json.loads(store.get(f"releases/{self.model}/promotion.json"))
        service = self.kinds["Service"].read(self.model) or {}
        objects = [
            self.kinds["Deployment"].read(name) or {} for name in self.kinds["Deployment"].names()
        ]
        pods = {obj["metadata"]["name"]: obj["spec"]["replicas"] for obj in objects}
        addresses = set(self.kinds["Service"].names()) - {self.model}
        assert champion
        serving = store.get(f"{champion.uri}model.safetensors").decode()

        checks = {
            "weights of the champion": (serving, run),
            "service": (service["spec"]["selector"][INSTANCE], champion.deployment),
            "pods": (pods, {name: int(name == champion.deployment) for name in pods}),
            "addresses": (addresses, set(pods)),
            "record": (
                state | {"former": "", "run_id": ""},
                {
                    "version": champion.version,
                    "deployment": champion.deployment,
                    "former": "",
                    "unfinished": False,
                    "run_id": "",
                },
            ),
        }

        wrong = [
            f"{name}: {value}, not {expected}"
            for name, (value, expected) in checks.items()
            if value != expected
        ]

        wrong += [f"{len(pods)} Deployments exist"] * (len(pods) > KEEP_RELEASES + 1)
        url = f"http://127.0.0.1:{self.shell.environ['REKINDLE_SERVE__PORT']}/v1/models/{self.model}:predict"
        answers: list[str] = []

        def has_newest_answer() -> bool:
            try:
                with urllib.request.urlopen(
                    url, b'{"instances": [{"id": 1}]}', timeout=10
                ) as answer:
                    answers.append(json.load(answer)["predictions"][0])
            except OSError as error:
                answers.append(str(error))
            return answers[-1] == run

        until(
            "the newest answer",
            has_newest_answer,
            evidence=lambda: [*wrong, f"{answers[-1]}, not {run}"],
        )
        return wrong


def play(seed: int, project: Project) -> tuple[str, list[str]]:
    """Release a version, with one to three interruptions. Return a log of the release, and the
    problems."""
    draw = Random(seed)
    moments = [Moment.draw(draw, project.changes) for _ in range(draw.choice([1, 1, 2, 3]))]
    log, run, problems = project.release(*moments, newer=draw.random() < 0.3)
    return f"seed {seed}: {'; '.join(log)}", problems + project.problems(run)


def main(argv: list[str]) -> int:
    """Run the command of this module, and return exit code 1 if a seed failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.rekindle.serving.interrupted.releases", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=20, help="number of seeds, if none is named")
    options = parser.parse_args(argv)
    failed_count = 0
    seeds = options.seeds or range(options.count)

    with tempfile.TemporaryDirectory(prefix="releases-") as folder:
        services = Services(Path(folder) / "services", {})
        try:
            os.environ.update(services.environment() | services.credentials() | services.login())
            services.ready()

            with Project(Path(folder) / "project", os.environ) as project:
                log, run, problems = project.release()
                print(
                    f"undisturbed: {project.changes} changes",
                    *log,
                    *problems,
                    *project.problems(run),
                    flush=True,
                )
                for seed in seeds:
                    line, problems = play(seed, project)
                    failed_count += bool(problems)
                    print("\n  FAILED ".join([line, *problems]), flush=True)
        finally:
            services.down()

    print(f"{len(seeds)} releases, {failed_count} failed")
    return int(failed_count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
