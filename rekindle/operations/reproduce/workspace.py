"""A temporary folder with its own home, services and environment, so that the home and services of
the user stay unchanged.

A separate process waits until this process has ended, even by `kill -9`, and then removes the
folder. This also ends the services of the workspace: a service ends when its record, a file in the
folder, is deleted.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from argolocal.common import homes
from argolocal.common.linux import die_with_parent
from argolocal.common.processes import python_command
from argolocal.pods.container_images import IMAGES_FILE
from argolocal.pods.containers import containers_of
from rekindle import tracking
from rekindle.cache.key import find_objects
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI, NOTIFY_URL, REKINDLE_CACHE
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import BUCKET, Services
from rekindle.operations.results import NOT_RELEASED
from rekindle.release.origin import Config
from rekindle.storage import Store

# variables that set the user's services, project and config overrides
REMOVED_PREFIXES = ("REKINDLE_", "S3_", "MLFLOW_", "AWS_")
REMOVED_VARIABLES = (NOTIFY_URL, "PYTHONPATH")
KEPT_VARIABLES = (REKINDLE_CACHE,)  # variables that the commands of the workspace inherit
# the folder is removed twice, because processes that are just ending may still write to it
REMOVAL_SCRIPT = 'cat >/dev/null; rm -rf "$1"; sleep 5; rm -rf "$1"'
SUCCESS_EXIT_CODES = (0, NOT_RELEASED)
# packages that the commit contains if the repository is Rekindle's own
REKINDLE_PACKAGES = ("rekindle", "argolocal")


class Workspace:
    """The temporary folder, with its commands and services."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.checkout = folder / "checkout"
        self.services = Services(self.home, self._clean_environment())

    def _clean_environment(self) -> dict[str, str]:
        """Return the environment without the addresses and settings of the user."""

        def is_kept(variable: str) -> bool:
            is_removed = variable.startswith(REMOVED_PREFIXES) or variable in REMOVED_VARIABLES
            return variable in KEPT_VARIABLES or not is_removed

        return {name: value for name, value in os.environ.items() if is_kept(name)}

    @property
    def commit_variables(self) -> dict[str, str]:
        """PYTHONPATH, if the commit contains Rekindle itself, so that the commit's code runs
        instead of the installed Rekindle."""
        has_rekindle = all(
            (self.checkout / name / "__init__.py").is_file() for name in REKINDLE_PACKAGES
        )
        if has_rekindle:
            return {"PYTHONPATH": str(self.checkout)}
        return {}

    def rekindle(self, folder: Path, *arguments: str) -> str:
        """Return the output of a command of Rekindle in the project `folder`. The command is
        stopped when this process ends.

        The lines of its stderr appear on the stderr of this process, except the summary of a
        successful run, because the summary refers to the temporary services. Raises RekindleError
        if the command fails.
        """
        environment = (
            self._clean_environment() | self.commit_variables | {"REKINDLE_HOME": str(self.home)}
        )
        parent = os.getpid()
        summary = list[str]()

        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                python_command("-m", "rekindle", *arguments),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

            assert process.stderr
            for line in process.stderr:
                if summary or not line.strip():
                    summary.append(line)
                else:
                    sys.stderr.write(line)

            if process.wait() not in SUCCESS_EXIT_CODES:
                sys.stderr.writelines(line for line in summary if not line.startswith("resume "))
                raise RekindleError(
                    f"`rekindle {arguments[0]}` ended with exit code {process.returncode}."
                )

            output.seek(0)
            return output.read()

    def use_images(self, config: Config, manifest: Mapping[str, Any], user_home: Path) -> None:
        """Copy images.yaml of the user's home, which maps images to interpreters; add the variables
        of the commit."""
        homes.make(self.home)

        file = user_home / IMAGES_FILE
        table = (yaml.safe_load(file.read_text()) if file.exists() else None) or {}

        templates = manifest["spec"].get("templates") or []
        images = {
            container["image"] for template in templates for _, container in containers_of(template)
        }
        # the images of jobs and servers
        cluster = config.cluster
        images.update({pod.image for pod in (cluster, *cluster.pods.values()) if pod.image})

        if self.commit_variables:
            for image in images:
                table.setdefault(image, {}).setdefault("env", {}).update(self.commit_variables)

        (self.home / IMAGES_FILE).write_text(yaml.safe_dump(table))

    def store(self, bucket: str = BUCKET) -> Store:
        """Return a bucket of the folder's own object store; it is created unless it exists."""
        store = Store(bucket, self.services.url("s3"), *self.services.credentials().values())
        store.client.create_bucket(Bucket=bucket)
        return store

    def copy(self, source: Store, key: str) -> None:
        """Copy an object or a folder to the bucket of the same name in the folder's own object
        store."""
        target = self.store(source.bucket)
        for entry in find_objects(source, key):
            target.put(entry.key, source.get(entry.key))

    def add_champion(self, source: Store, release: tracking.Release, name: str) -> None:
        """Copy a release, and make the copy the champion of `model` in the folder's own MLflow."""
        prefix = f"{release.uri.rstrip('/')}/"
        for entry in source.list(prefix):
            self.store().put(entry.key, source.get(entry.key))

        os.environ.update(
            {MLFLOW_TRACKING_URI: self.services.url("mlflow"), **self.services.login()}
        )
        self.services.ready()

        run_id = tracking.start_run("releases", f"{name}-{release.version}")
        copied = tracking.register(
            name, prefix, self.store().uri(prefix), release.sha256, run_id, {}
        )
        tracking.record_champion(name, copied.version, "none")

    def stop(self) -> None:
        """Stop the services, and the servers of a pipeline that released a model."""
        cluster = LocalCluster(self.home, {})
        cluster.services = self.services
        with suppress(RekindleError):
            cluster.down()


@contextmanager
def temporary_workspace() -> Iterator[Workspace]:
    """Yield a workspace, and remove it at the end, even if this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="rekindle-reproduce-"))

    remover = subprocess.Popen(
        ["sh", "-c", REMOVAL_SCRIPT, "sh", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workspace = Workspace(folder)

    try:
        yield workspace
    finally:
        workspace.stop()
        assert remover.stdin
        remover.stdin.close()
