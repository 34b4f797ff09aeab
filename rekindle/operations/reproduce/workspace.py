"""A temporary folder with its own REKINDLE_HOME, services and environment, so that REKINDLE_HOME
and the services of the user stay unchanged.

A separate process waits until this process has ended, even by `kill -9`, and then removes the
folder. Removing the folder also ends the services of the workspace, because a service ends when its
record, a file in the folder, is deleted.
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
from argolocal.common.processes import make_python_command
from argolocal.pods.container_images import IMAGES_FILE_NAME
from argolocal.pods.containers import list_containers
from rekindle import tracking
from rekindle.cache.key import find_objects
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI, NOTIFY_URL, REKINDLE_CACHE
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import DEFAULT_BUCKET, Services
from rekindle.operations.results import NOT_RELEASED_EXIT_CODE
from rekindle.release.origin import RecordedConfig
from rekindle.storage import Store

# variables that set the user's services, project and config overrides
REMOVED_VARIABLE_PREFIXES = ("REKINDLE_", "S3_", "MLFLOW_", "AWS_")
REMOVED_VARIABLES = (NOTIFY_URL, "PYTHONPATH")
# variables that the commands of the workspace inherit
KEPT_VARIABLES = (REKINDLE_CACHE,)
# the folder is removed twice, because processes that are just ending may still write to it
REMOVAL_SCRIPT = 'cat >/dev/null; rm -rf "$1"; sleep 5; rm -rf "$1"'
SUCCESS_EXIT_CODES = (0, NOT_RELEASED_EXIT_CODE)
# packages that the commit contains if the repository is Rekindle's own
REKINDLE_PACKAGES = ("rekindle", "argolocal")


class Workspace:
    """The temporary folder, with its commands and services."""

    def __init__(self, workspace_folder: Path) -> None:
        self.folder = workspace_folder
        self.home = workspace_folder / "home"
        self.checkout = workspace_folder / "checkout"
        self.services = Services(self.home, self._make_clean_environment())

    def _make_clean_environment(self) -> dict[str, str]:
        """Return the environment without the addresses and settings of the user."""

        def is_kept(variable_name: str) -> bool:
            is_removed = (
                variable_name.startswith(REMOVED_VARIABLE_PREFIXES)
                or variable_name in REMOVED_VARIABLES
            )
            return variable_name in KEPT_VARIABLES or not is_removed

        return {
            variable_name: variable_value
            for variable_name, variable_value in os.environ.items()
            if is_kept(variable_name)
        }

    @property
    def commit_variables(self) -> dict[str, str]:
        """PYTHONPATH, if the commit contains Rekindle itself, so that the commit's code runs
        instead of the installed Rekindle."""
        has_rekindle = all(
            (self.checkout / package_name / "__init__.py").is_file()
            for package_name in REKINDLE_PACKAGES
        )
        if has_rekindle:
            return {"PYTHONPATH": str(self.checkout)}
        return {}

    def rekindle(self, project_folder: Path, *command_arguments: str) -> str:
        """Return the output of a command of Rekindle in the project `project_folder`. The command
        is stopped when this process ends.

        The lines of its stderr appear on the stderr of this process, except the summary of a
        successful run, because the summary refers to the temporary services. Raises RekindleError
        if the command fails.
        """
        environment = (
            self._make_clean_environment()
            | self.commit_variables
            | {"REKINDLE_HOME": str(self.home)}
        )
        parent_pid = os.getpid()
        summary_lines = list[str]()

        with tempfile.TemporaryFile("w+") as output_file:
            rekindle_process = subprocess.Popen(
                make_python_command("-m", "rekindle", *command_arguments),
                cwd=project_folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: die_with_parent(parent_pid),
            )

            assert rekindle_process.stderr
            for line in rekindle_process.stderr:
                if summary_lines or not line.strip():
                    summary_lines.append(line)
                else:
                    sys.stderr.write(line)

            if rekindle_process.wait() not in SUCCESS_EXIT_CODES:
                sys.stderr.writelines(
                    line for line in summary_lines if not line.startswith("resume ")
                )
                raise RekindleError(
                    f"`rekindle {command_arguments[0]}` ended with exit code"
                    f" {rekindle_process.returncode}."
                )

            output_file.seek(0)
            return output_file.read()

    def use_images(
        self, pipeline_config: RecordedConfig, manifest: Mapping[str, Any], user_home: Path
    ) -> None:
        """Copy images.yaml of the user's REKINDLE_HOME, which maps images to interpreters; add the
        variables of the commit."""
        homes.create_home(self.home)

        images_file = user_home / IMAGES_FILE_NAME
        images_table = (
            yaml.safe_load(images_file.read_text()) if images_file.exists() else None
        ) or {}

        workflow_templates = manifest["spec"].get("templates") or []
        image_names = {
            container["image"]
            for workflow_template in workflow_templates
            for _, container in list_containers(workflow_template)
        }
        # also map the images of jobs and model servers
        cluster_config = pipeline_config.cluster
        image_names.update(
            {
                pod_config.image
                for pod_config in (cluster_config, *cluster_config.pods.values())
                if pod_config.image
            }
        )

        if self.commit_variables:
            for image_name in image_names:
                images_table.setdefault(image_name, {}).setdefault("env", {}).update(
                    self.commit_variables
                )

        (self.home / IMAGES_FILE_NAME).write_text(yaml.safe_dump(images_table))

    def store(self, bucket_name: str = DEFAULT_BUCKET) -> Store:
        """Return a bucket of the workspace's own object store; create the bucket if it does not
        exist."""
        object_store = Store(
            bucket_name, self.services.url("s3"), *self.services.credentials().values()
        )
        object_store.client.create_bucket(Bucket=bucket_name)
        return object_store

    def copy(self, source_store: Store, key: str) -> None:
        """Copy an object or a folder to the bucket of the same name in the folder's own object
        store."""
        target_store = self.store(source_store.bucket)
        for object_entry in find_objects(source_store, key):
            target_store.put(object_entry.key, source_store.get(object_entry.key))

    def add_champion(self, source_store: Store, release: tracking.Release, model_name: str) -> None:
        """Copy a release, and make the copy the champion of `model_name` in the folder's own
        MLflow. After the call, this process uses the MLflow of the workspace."""
        release_prefix = f"{release.uri.rstrip('/')}/"
        for object_entry in source_store.list(release_prefix):
            self.store().put(object_entry.key, source_store.get(object_entry.key))

        os.environ.update(
            {MLFLOW_TRACKING_URI: self.services.url("mlflow"), **self.services.login()}
        )
        self.services.ready()

        run_id = tracking.start_run("releases", f"{model_name}-{release.version}")
        copied_release = tracking.register_version(
            model_name, release_prefix, self.store().uri(release_prefix), release.sha256, run_id, {}
        )
        tracking.record_champion(model_name, copied_release.version, "none")

    def stop(self) -> None:
        """Stop the services, and the servers of a pipeline that released a model."""
        local_cluster = LocalCluster(self.home, {})
        local_cluster.services = self.services
        with suppress(RekindleError):
            local_cluster.down()


@contextmanager
def create_temporary_workspace() -> Iterator[Workspace]:
    """Yield a workspace, and remove it at the end, even if this process is killed."""
    workspace_folder = Path(tempfile.mkdtemp(prefix="rekindle-reproduce-"))

    removal_process = subprocess.Popen(
        ["sh", "-c", REMOVAL_SCRIPT, "sh", str(workspace_folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workspace = Workspace(workspace_folder)

    try:
        yield workspace
    finally:
        workspace.stop()
        assert removal_process.stdin
        removal_process.stdin.close()
