"""The files and outputs of one running pod.

    pod = PodRun(action, root, log)
    pod.host_path("/tmp/out.txt")                          # path of a pod's file on this machine
    phase, message, outputs = pod.collect(name, store)

A pod's private files are below its root directory (filesystem.py). If mount namespaces are
unavailable, the tags `{{inputs|outputs...path}}` are replaced by paths on this machine. As in Argo,
outputs are collected even if the main container has failed, but the message of the pod is then
about the failure of the main container, not about missing outputs.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.nodes import StartPod
from argolocal.engine.scope import POD_PATH_MARK
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.manifest.allowed_values import SCRIPT_PATH
from argolocal.manifest.volume_claims import list_claims
from argolocal.pods import artifacts, containers, filesystem, volumes
from argolocal.pods.artifacts import ArtifactError
from argolocal.pods.kinds.container_set import ContainerSet, main_container
from argolocal.pods.kinds.sidecars import CONTAINER_LIST_FIELDS, Sidecars
from argolocal.pods.process import ContainerRun, Process, read_field
from argolocal.pods.volumes import VolumeDirectory, make_bind_mounts
from argolocal.state.machine_resources import sum_requests
from argolocal.state.progress import PROGRESS_PATH, PROGRESS_VARIABLE, read_progress

SIDECAR_GRACE_S = 10.0  # seconds between SIGTERM and SIGKILL
# maximum size of outputs.result: the last bytes of stdout
MAX_RESULT_BYTES = 256 << 10
Outputs = dict[str, Any]
Store = Callable[[dict[str, Any]], Any]


def list_containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a pod that run at the same time."""
    if "containerSet" in template:
        containers = template["containerSet"].get("containers") or []
    else:
        containers = [template.get("container") or template.get("script") or {}]
    return [*containers, *(template.get("sidecars") or [])]


@dataclass
class PodRun:
    """One running pod.

    `log`: log of the main container. `work`: the future of a call that runs in a thread, and the
    function that the event loop calls afterwards. `kill_reason`: message about why the pod is
    killed, or None. `kill_at`: unix time at which SIGKILL is sent.
    """

    action: StartPod
    root: Path
    log: Path
    process: Process | None = None
    # name of a container → pidfd of its process
    descriptors: dict[str, int] = field(default_factory=dict)
    work: tuple[Future[Any], Callable[["PodRun", Future[Any]], None]] | None = None
    sidecars: Sidecars | None = None
    volumes: dict[str, VolumeDirectory] = field(default_factory=dict)
    # working directory of the main container; relative output paths start here
    working_directory: str = "/"
    # function that replaces $(NAME) in a text by the value of this variable of the main container
    expand: Callable[[str], str] = str
    kill_reason: str | None = None
    # True once the log says that the pod waits for GPUs or memory
    is_waiting: bool = False
    has_resources: bool = False
    kill_at: float | None = None
    # the progress that was reported last, and the monotonic time of this report
    progress: str = ""
    progress_time: float = float("-inf")

    @cached_property
    def private_paths(self) -> tuple[str, ...] | None:
        """The paths of the pod's private files. The value is None if mount namespaces are
        unavailable; the template may then refer to its files only by tags."""
        if not filesystem.supports_namespaces():
            return None
        paths = [
            os.path.join(self.working_directory, path)
            for path in list_declared_paths(self.template)
        ]
        if "script" in self.template:
            paths.append(SCRIPT_PATH)
        paths.append(PROGRESS_PATH)

        return tuple(paths)

    @property
    def template(self) -> dict[str, Any]:
        return self.action.template

    @property
    def group(self) -> ContainerSet | None:
        """The containers of a containerSet template, or None for other templates."""
        if isinstance(self.sidecars, ContainerSet):
            return self.sidecars
        return None

    @property
    def processes(self) -> list[Process]:
        """The processes to signal when the pod is killed. The processes of sidecars are not
        included, because `collect` ends sidecars after all other processes of the pod have
        exited."""
        if self.group:
            return [*self.group.running.values()]
        if self.process:
            return [self.process]
        return []

    @property
    def volumes_folder(self) -> Path:
        """The directory of the pod's volumes."""
        return self.root.with_name(f"{self.root.name}.volumes")

    @property
    def archived_logs(self) -> dict[str, Path]:
        """The paths of the logs to save as artifacts, by container name."""
        if not (self.template.get("archiveLocation") or {}).get("archiveLogs"):
            return {}
        log_paths = {container["name"]: self._log(container) for container in self._members()} | {
            "main": self.log
        }
        return {
            container_name: log_path
            for container_name, log_path in log_paths.items()
            if log_path.exists()
        }

    def journal_key(self, container_name: str) -> str:
        """Return the key under which the journal records the process of a container."""
        if container_name == "main":
            return self.action.id
        return f"{self.action.id} {container_name}"

    def _members(self) -> list[dict[str, Any]]:
        return (self.template.get("containerSet") or {}).get("containers") or []

    def _log(self, container: dict[str, Any]) -> Path:
        return self.log.with_name(f"{self.log.stem}.{container['name']}.log")

    def clean_up(self) -> None:
        """Remove files and logs of an earlier attempt of this pod, whose runner died."""
        for container in [
            *self._members(),
            *(
                container
                for list_field in CONTAINER_LIST_FIELDS
                for container in self.template.get(list_field) or []
            ),
        ]:
            self._log(container).unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        artifacts.remove_directory(self.root)

    @property
    def view(self) -> filesystem.FileSystemView | None:
        """The file system tree of the main container. The value is None if mount namespaces are
        unavailable."""
        if self.private_paths is None:
            return None
        if self.group:
            container_view = self.group.view
        else:
            container_view = self.process.view if self.process else None
        volume_mounts = main_container(self.template).get("volumeMounts") or []
        return container_view or filesystem.FileSystemView(
            self.root,
            self.private_paths,
            make_bind_mounts(self.volumes, volume_mounts, self.expand),
        )

    def container_run(self, container: dict[str, Any], namespace: str) -> ContainerRun:
        """Return the ContainerRun of a container of this pod."""
        return ContainerRun(self.action.pod, container, self.root, self.log, namespace=namespace)

    def acquire_resources(self, cluster: Cluster) -> bool:
        """Acquire the GPUs and the memory that the containers of this pod request, and add
        environment variables such as CUDA_VISIBLE_DEVICES to the containers. Return False while
        other runs use the GPUs or the memory. Raises ValueError for a malformed quantity."""
        if self.has_resources:
            return True
        main_containers = list_containers(self.template)
        request = sum_requests(main_containers)
        allocation = cluster.resources.acquire(self.action.pod, request)
        if allocation is None:
            if not self.is_waiting:
                self.is_waiting = True
                with self.log.open("a") as log:
                    log.write(f"waits for {request}, which other runs use\n")
            return False

        self.has_resources = True
        variables = [{"name": name, "value": value} for name, value in allocation.variables.items()]
        for container in [*main_containers, *(self.template.get("initContainers") or [])]:
            container["env"] = [*(container.get("env") or []), *variables]
        return True

    def create_volumes(self, cluster: Cluster, workflow: dict[str, Any]) -> None:
        """Create the directories of the pod's volumes. Raises ConfigError or OSError if a volume
        cannot be created."""
        container_run = self.container_run({}, workflow["metadata"]["namespace"])
        artifacts.remove_directory(self.volumes_folder)
        run_claims = [
            volume["persistentVolumeClaim"]["claimName"] for volume in list_claims(workflow)
        ]
        volume_specs = self.template.get("volumes") or []
        self.volumes = volumes.create(
            volume_specs,
            self.volumes_folder,
            cluster,
            lambda field_path, variable_name: read_field(container_run, field_path, variable_name),
            run_claims,
        )

    def prepare(self, cluster: Cluster, namespace: str) -> ContainerRun:
        """Prepare the pod's files, and return its main container. Set `sidecars` if the pod has
        other containers. Raises ConfigError, OSError or ValueError if the files cannot be
        prepared."""
        # check the image again, because its name may have contained tags when it was checked before
        # the run
        containers.check_images(self.template, self.action.pod, cluster)
        template = resolve_paths(self.template, self.root if self.private_paths is None else None)
        container = {"name": "main", **main_container(template)}

        script_source = container.pop("source", "")
        if script_source:
            script_file = filesystem.path_in_root(self.root, SCRIPT_PATH)
            script_file.parent.mkdir(parents=True, exist_ok=True)
            script_file.write_text(script_source)
            script_file.chmod(0o755)
            script_path = str(script_file) if self.private_paths is None else SCRIPT_PATH
            container["args"] = [*(container.get("args") or []), script_path]

        if self.private_paths is None:
            for path in list_declared_paths(template):
                self.host_path(path).parent.mkdir(parents=True, exist_ok=True)

        progress_file = filesystem.path_in_root(self.root, PROGRESS_PATH)
        if self.private_paths is None:
            progress_file.parent.mkdir(parents=True, exist_ok=True)
        progress_path = str(progress_file) if self.private_paths is None else PROGRESS_PATH

        container_run = replace(
            self.container_run(container, namespace),
            extra_env={PROGRESS_VARIABLE: progress_path},
            private_paths=self.private_paths,
            stdout=self.root / ".stdout" if self.action.capture else None,
            volumes=self.volumes,
        )
        if "containerSet" in template:
            self.sidecars = ContainerSet(template, container_run, cluster)
        elif (
            any(template.get(list_field) for list_field in CONTAINER_LIST_FIELDS)
            and not self.sidecars
        ):
            self.sidecars = Sidecars(template, container_run, cluster)

        return container_run

    def find_new_progress(self) -> str:
        """Return the progress that the main container has reported since the last call, or ""."""
        progress = read_progress(filesystem.path_in_root(self.root, PROGRESS_PATH))
        if progress == self.progress:
            return ""
        self.progress = progress or self.progress
        return progress

    def host_path(self, path: str, keeps_final_link: bool = False) -> Path:
        """Return the file on this machine at the main container's `path`.

        With `keeps_final_link`, a link in the last component of the path is not followed.

        Raises OSError, and ConfigError for a volume that cannot be mounted.
        """
        path = os.path.join(self.working_directory, path)

        container_view = self.view
        if not container_view:
            return filesystem.path_in_root(self.root, path)

        parent_path, _, name = os.path.normpath(path).rpartition("/")
        if keeps_final_link:
            resolved_path = filesystem.resolve_links(parent_path, container_view.host_path) / name
        else:
            resolved_path = filesystem.resolve_links(path, container_view.host_path)

        return container_view.host_path(resolved_path, must_exist=True)

    def collect(self, workflow_name: str, open_store: Store) -> tuple[str, str, Outputs]:
        """Stop the sidecars of a pod whose other processes have exited, and collect its outputs.
        Return the pod's phase, message and outputs. Raises StorageError or OSError if a log cannot
        be saved."""
        sidecar_failure = self.sidecars.stop(SIDECAR_GRACE_S) if self.sidecars else ""
        if self.sidecars and self.sidecars.log_error:
            raise self.sidecars.log_error

        if self.group:
            exit_code = self.group.codes.get("main")
            failure_message = self.group.failure()
        else:
            assert self.process
            exit_code = self.process.code
            failure_message = f"main: {self.process.failure}" if exit_code else ""

        outputs: Outputs = {} if exit_code is None else {"exitCode": str(exit_code)}
        if self.action.capture and exit_code is not None:
            outputs.update(_read_result(self.root / ".stdout"))

        error_messages = [
            *self._collect_parameters(outputs),
            *self._save_artifacts(outputs, workflow_name, open_store),
        ]
        if self.kill_reason or failure_message:
            return "Failed", self.kill_reason or failure_message, outputs
        if error_messages:
            return "Error", f"wait: Error (exit code 64): {error_messages[0]}", outputs
        if sidecar_failure:
            return "Failed", sidecar_failure, outputs

        return "Succeeded", "", outputs

    def _collect_parameters(self, outputs: Outputs) -> Iterator[str]:
        """Add the output parameters to `outputs`. Yield a message for each missing parameter."""
        for parameter in (self.template.get("outputs") or {}).get("parameters") or []:
            value = self._read_parameter(parameter)
            if value is None:
                missing_path = (parameter.get("valueFrom") or {}).get("path", "").lstrip("/")
                yield (
                    f"open /var/run/argo/outputs/parameters/{missing_path}: no such file or"
                    " directory"
                )

            outputs.setdefault("parameters", []).append(
                parameter if value is None else {**parameter, "value": value}
            )

    def _save_artifacts(
        self, outputs: Outputs, workflow_name: str, open_store: Store
    ) -> Iterator[str]:
        """Upload the output artifacts and the archived logs, and add them to `outputs`. Yield one
        message about all artifacts that cannot be saved."""
        saved_artifacts: list[dict[str, Any]] = []
        artifact_errors: list[str] = []
        archive_location = (self.template.get("archiveLocation") or {}).get("s3")

        for artifact in (self.template.get("outputs") or {}).get("artifacts") or []:
            try:
                saved_artifact = artifacts.save_artifact(
                    artifact,
                    self.host_path(artifact["path"], keeps_final_link=True),
                    self.host_path(artifact["path"]),
                    self.root,
                    self.action.pod,
                    workflow_name,
                    open_store,
                    archive_location,
                )
                if saved_artifact:
                    saved_artifacts.append(saved_artifact)
            except (ArtifactError, OSError) as error:
                artifact_errors.append(str(error))

        key_prefix = f"{workflow_name}/{self.action.pod}"
        saved_artifacts += [
            artifacts.save_log(container_name, log_path, self.template, key_prefix, open_store)
            for container_name, log_path in self.archived_logs.items()
        ]
        if saved_artifacts:
            outputs["artifacts"] = saved_artifacts
        if artifact_errors:
            yield "".join(f"{error_text}; " for error_text in artifact_errors)

    def _read_parameter(self, parameter: dict[str, Any]) -> str | None:
        """Return the value of an output parameter. Return None if the file of the parameter is
        missing and the parameter has no default."""
        value_source = parameter.get("valueFrom") or {}
        if "path" not in value_source:
            return parameter.get("value", value_source.get("default"))

        try:
            parameter_file = self.host_path(value_source["path"])
            # only regular files are read, because reading a pipe would block
            if not parameter_file.is_file():
                raise FileNotFoundError(parameter_file)

            file_text = parameter_file.read_bytes().decode(errors="replace")
        except OSError:
            file_text = value_source.get("default")

        if file_text is not None:
            return file_text.removesuffix("\n")

        return None


def list_declared_paths(template: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of the artifacts and output parameters that a template declares."""
    yield from (
        artifact["path"] for artifact in template["inputs"]["artifacts"] if artifact.get("path")
    )
    outputs = template.get("outputs") or {}
    yield from (
        artifact["path"] for artifact in outputs.get("artifacts") or [] if artifact.get("path")
    )
    for parameter in outputs.get("parameters") or []:
        path = (parameter.get("valueFrom") or {}).get("path")
        if path:
            yield path


def resolve_paths(template: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """Return the template with `root` instead of each POD_PATH_MARK, the prefix of each path that
    has replaced a tag. Without `root`, only remove the marks."""
    template_json = to_json(template, ensure_ascii=False)
    if POD_PATH_MARK not in template_json:
        return template
    return json.loads(
        template_json.replace(POD_PATH_MARK, to_json(str(root))[1:-1] if root else "")
    )


def _read_result(stdout: Path) -> Outputs:
    """Return {"result": the end of stdout}, or {} if the container never started."""
    if not stdout.exists():
        return {}
    with open(stdout, "rb") as stdout_file:
        stdout_file.seek(max(0, os.fstat(stdout_file.fileno()).st_size - MAX_RESULT_BYTES - 1))
        stdout_bytes = stdout_file.read().removesuffix(b"\n")
    return {"result": stdout_bytes[-MAX_RESULT_BYTES:].decode(errors="replace")}


def check_paths(template: dict[str, Any]) -> None:
    """Raise ConfigError if a template uses paths that cannot be redirected into the pod's folder.
    The template `template` still contains its tags."""
    template_text = f'template "{template.get("name")}"'
    container_json = to_json(main_container(template))
    # paths that the container uses directly, not by a tag
    literal_paths = [
        volume_mount["mountPath"]
        for volume_mount in main_container(template).get("volumeMounts") or []
    ]
    template_paths = [*literal_paths]

    for direction in ("inputs", "outputs"):
        for list_field in ("artifacts", "parameters"):
            for declaration in (template.get(direction) or {}).get(list_field) or []:
                path = declaration.get("path") or (declaration.get("valueFrom") or {}).get("path")
                if not path:
                    continue

                template_paths.append(path)
                tag_name = f"{direction}.{list_field}.{declaration['name']}.path"
                if path in container_json or tag_name not in container_json:
                    literal_paths.append(path)

    invalid_path = filesystem.find_unsupported_path(template_paths)
    if invalid_path:
        raise ConfigError(
            f"{template_text}: the path {invalid_path} is in a system directory: use a path below"
            " /tmp."
        )

    if literal_paths and not filesystem.supports_namespaces():
        raise ConfigError(
            f"{template_text} contains the path {literal_paths[0]}, which its pods would share,"
            " because private mount namespaces are not available here. Write"
            " {{outputs.parameters.NAME.path}} (or ...artifacts.NAME.path) instead of this path."
        )
