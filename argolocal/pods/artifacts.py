"""Copy artifacts between a pod's directory and the object store, with Argo's keys and archives.

An input artifact without the field `archive` is unpacked if it is a gzipped tar. If a tar has a
single entry, this entry becomes the file or directory at the artifact's path.

The behaviour follows Argo's executor.go (loadArtifact, unpack, saveArtifact).
"""

import contextlib
import gzip
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argolocal.errors import ArgolocalError, ConfigError, NotFound, StorageError
from argolocal.manifest.allowed_values import ARTIFACT_GC_STRATEGIES
from argolocal.pods import archives, web
from argolocal.store import ObjectStore

# a function that returns the ObjectStore of an `s3` location
OpenStore = Callable[..., Any]
# Argo's executor copies files into this directory before it zips them
STAGING_PATH = "/tmp/argo/outputs/artifacts"


class GoTarFile(tarfile.TarFile):
    """A tar that stores hard links as full files, as Go does."""

    def gettarinfo(self, *args: Any, **kwargs: Any) -> tarfile.TarInfo:
        self.inodes.clear()  # pyright: ignore
        return super().gettarinfo(*args, **kwargs)


class ArtifactError(Exception):
    """An artifact cannot be loaded or saved. The message of an ArtifactError is the message that
    Argo would show."""


def load(artifact: dict[str, Any], path: Path, open_store: OpenStore) -> None:
    """Load an input artifact to `path`. Raises ArtifactError if the artifact is missing or invalid,
    and StorageError if the store fails."""
    # an artifact has no location if it is the output of a skipped step
    if not any(artifact.get(location_kind) for location_kind in ("s3", "raw", "http")):
        if artifact.get("optional"):
            return

        raise ArtifactError(f"required artifact '{artifact['name']}' not supplied")

    path.parent.mkdir(parents=True, exist_ok=True)
    # use the folder of the artifact, so that a rename moves the files; the name of the directory is
    # unique, because other artifacts may be in the same folder
    with TemporaryDirectory(prefix=".artifact-", dir=path.parent) as temporary_folder:
        downloaded_file = Path(temporary_folder) / "downloaded"
        if not _fetch(artifact, downloaded_file, open_store):
            # create this directory, as the kubelet of a cluster would do for the mount point
            path.mkdir(exist_ok=True)
            return
        _place(artifact, downloaded_file, path)

    if artifact.get("mode") is not None:
        for artifact_file in [path, *(path.rglob("*") if artifact.get("recurseMode") else ())]:
            if not artifact_file.is_symlink():
                artifact_file.chmod(int(artifact["mode"]))


def _fetch(artifact: dict[str, Any], target_file: Path, open_store: OpenStore) -> bool:
    """Write an artifact to `target_file`, as it is stored, not unpacked. Return False if an
    optional artifact does not exist. Raises ArtifactError if a required artifact is missing, and
    StorageError if the store fails."""
    if artifact.get("raw"):
        target_file.write_text(artifact["raw"]["data"])
        # all users may write to the file, as in Argo, whose executor runs without a umask
        target_file.chmod(0o666)
        return True

    if artifact.get("http"):
        _download(artifact, target_file)
        return True

    try:
        open_store(artifact["s3"]).download(artifact["s3"]["key"], target_file)
    except StorageError as error:
        if artifact.get("optional") and isinstance(error, NotFound):
            return False
        raise ArtifactError(f"artifact {artifact['name']} failed to load: {error}") from None
    return True


def _place(artifact: dict[str, Any], downloaded_file: Path, path: Path) -> None:
    """Move a downloaded artifact to `path`, and unpack it if it is an archive. Raises
    ArtifactError."""
    archive_options = artifact.get("archive") or {}
    try:
        if "zip" in archive_options:
            archives.unpack_zip(downloaded_file, path)
        elif "none" not in archive_options and (
            "tar" in archive_options or archives.is_tarball(downloaded_file)
        ):
            archives.unpack_tar(downloaded_file, path)
        else:
            downloaded_file.replace(path)
    except archives.ArchiveError as error:
        raise ArtifactError(str(error)) from error


def _download(artifact: dict[str, Any], target_file: Path) -> None:
    """Download an `http` artifact. Raises ArtifactError."""
    http_source = artifact["http"]
    # drop a Host header, because Go's HTTP client ignores it
    headers = [
        (header["name"], header["value"])
        for header in http_source.get("headers") or []
        if header["name"].lower() != "host"
    ]
    message = f"artifact {artifact['name']} failed to load"

    try:
        with web.request(http_source["url"], headers=headers, timeout=60) as response:
            if not 200 <= response.status < 300:
                url = web.hide_password(http_source["url"])
                raise ArtifactError(f"{message}: {url}: {response.status} {response.reason}")

            max_bytes = int(archives.MAX_DISK_SHARE * shutil.disk_usage(target_file.parent).free)
            with target_file.open("wb") as file:
                web.copy_body(response, file, max_bytes)
    except (web.WebError, OSError) as error:
        # an OSError means that the local file cannot be written
        raise ArtifactError(f"{message}: {error}") from None


def save_artifact(
    artifact: dict[str, Any],
    link_path: Path,
    path: Path,
    temporary_folder: Path,
    pod_name: str,
    workflow_name: str,
    open_store: OpenStore,
    archive_location: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Upload an output artifact. Return the artifact with its key, or None if an optional artifact
    is missing.

    `link_path`: file at the artifact's path in the pod, possibly a link. `path`: file or directory
    to which the link at `link_path` leads. `temporary_folder`: directory for temporary archives.
    `archive_location` is `s3` of the template's archiveLocation, the default location. Raises
    ArtifactError.
    """
    failed_call = _find_failing_call(artifact, link_path, path)
    if failed_call:
        if artifact.get("optional"):
            return None

        raise ArtifactError(f"{failed_call}: no such file or directory")

    if not (path.is_file() or path.is_dir()):
        raise ArtifactError(f"{artifact['path']} is not a regular file or directory")

    uploaded_file, key_name = _pack_artifact(artifact, link_path, path, temporary_folder)
    artifact_location = artifact.get("s3") or {}
    base_location = _default_location(archive_location, f"{workflow_name}/{pod_name}")
    target_location = {
        **base_location,
        "key": f"{base_location['key']}/{key_name}",
        **artifact_location,
    }

    # the artifact's own bucket gets no other settings, such as credentials, of the default location
    if artifact_location.get("endpoint") and artifact_location.get("bucket"):
        target_location = {**artifact_location, "key": target_location["key"]}

    try:
        open_store(target_location).upload(uploaded_file, target_location["key"], links=False)
    except StorageError as error:
        raise ArtifactError(f"artifact {artifact['name']} failed to save: {error}") from None
    finally:
        if uploaded_file != path:
            uploaded_file.unlink()

    return {**artifact, "s3": target_location}


def _pack_artifact(
    artifact: dict[str, Any], link_path: Path, path: Path, temporary_folder: Path
) -> tuple[Path, str]:
    """Pack an output artifact into the archive that its field `archive` asks for. Return the file
    to upload, and the file's name in the default key. If the artifact is not packed, the file to
    upload is `path`."""
    archive_options = artifact.get("archive") or {}

    if "zip" in archive_options:
        key_name = f"{artifact['name']}.zip"
        zip_path = temporary_folder / f".{key_name}"
        _zip_path(path, zip_path, artifact["name"])
        return zip_path, key_name

    if "none" in archive_options:
        return path, link_path.name

    key_name = f"{artifact['name']}.tgz"
    tar_path = temporary_folder / f".{key_name}"
    requested_level = (archive_options.get("tar") or {}).get("compressionLevel")
    # as in Argo, an invalid gzip level is ignored; `check_artifacts` rejects it for files in
    # volumes
    if isinstance(requested_level, int) and requested_level in range(10):
        compression_level = requested_level
    else:
        compression_level = 6

    with (
        gzip.GzipFile(tar_path, "wb", compression_level, mtime=0) as gzip_file,
        GoTarFile.open(fileobj=gzip_file, mode="w") as tar_file,
    ):
        tar_file.add(link_path if path.is_dir() else path, arcname=link_path.name)

    return tar_path, key_name


def _find_failing_call(artifact: dict[str, Any], link_path: Path, path: Path) -> str:
    """Return the system call of Argo's executor that would not find the artifact's file, or "". For
    example, Argo can zip a file only if its name is the artifact's name."""
    archive_options = artifact.get("archive") or {}
    if not path.exists():
        return f"open /var/run/argo/outputs/artifacts{artifact['path']}.tgz"
    if "none" in archive_options and path.is_dir() and link_path.is_symlink():
        return f"open {STAGING_PATH}/{link_path.name}"
    is_missing = "zip" in archive_options and path.is_file() and link_path.name != artifact["name"]
    if is_missing:
        return f"stat {STAGING_PATH}/{artifact['name']}"
    return ""


def _default_location(archive_location: dict[str, Any] | None, key_prefix: str) -> dict[str, Any]:
    """Return the default location of artifacts: a complete archiveLocation, or the default
    repository."""
    is_complete = archive_location and all(
        archive_location.get(location_field) for location_field in ("endpoint", "bucket", "key")
    )
    if archive_location and is_complete:
        return dict(archive_location)
    return {"key": key_prefix}


def save_log(
    container_name: str,
    log_path: Path,
    template: dict[str, Any],
    key_prefix: str,
    open_store: OpenStore,
) -> dict[str, Any]:
    """Upload a container's log. Return the artifact of the log with its key. Raises
    StorageError."""
    base_location = _default_location(template["archiveLocation"].get("s3"), key_prefix)
    target_location = {**base_location, "key": f"{base_location['key']}/{container_name}.log"}
    open_store(target_location).upload(log_path, target_location["key"])
    return {"name": f"{container_name}-logs", "s3": target_location}


def _zip_path(path: Path, zip_path: Path, entry_name: str) -> None:
    """Zip a directory or file. As in Argo, a directory gets the name `entry_name` in the zip and
    loses its empty directories, and a file gets the path STAGING_PATH/`entry_name`."""
    with zipfile.ZipFile(zip_path, "w", zipfile.ZIP_DEFLATED) as zip_archive:
        if path.is_file():
            zip_entry = zipfile.ZipInfo.from_file(path)
            zip_entry.filename = f"{STAGING_PATH}/{entry_name}"
            with zip_archive.open(zip_entry, "w") as entry_writer, path.open("rb") as source_file:
                shutil.copyfileobj(source_file, entry_writer)

        for file_path in sorted(path.rglob("*")):
            if file_path.is_file():
                zip_archive.write(file_path, Path(entry_name) / file_path.relative_to(path))


def collect_garbage(
    status: dict[str, Any], spec: dict[str, Any], open_store: OpenStore
) -> list[str]:
    """Delete the output artifacts whose garbage collection strategy is OnWorkflowCompletion, and
    mark them as deleted in `status`. Return the ids of the changed nodes.

    A failed deletion adds a condition to the status of the workflow. The strategy
    OnWorkflowDeletion has no effect here, because workflows are never deleted. As in Argo's S3
    driver, a key with a trailing / is a directory. Source: Argo's artifact_gc.go.
    """
    changed_node_ids = []

    for node_id, node in status["nodes"].items():
        if node["type"] != "Pod":
            continue

        for artifact in (node.get("outputs") or {}).get("artifacts") or []:
            if (
                artifact.get("deleted")
                or find_gc_strategy(artifact, spec) != ARTIFACT_GC_STRATEGIES[0]
                or not artifact.get("s3")
            ):
                continue

            try:
                _delete_objects(artifact["s3"]["key"], open_store(artifact["s3"]))
            except (ArgolocalError, KeyError, OSError, ValueError) as error:
                other_conditions = [
                    condition
                    for condition in status.get("conditions", [])
                    if condition["type"] != "ArtifactGCError"
                ]
                new_condition = {"type": "ArtifactGCError", "status": "True", "message": str(error)}
                status["conditions"] = [*other_conditions, new_condition]
            else:
                artifact["deleted"] = True
                changed_node_ids.append(node_id)

    return changed_node_ids


def _delete_objects(key: str, store: ObjectStore) -> None:
    if key.endswith("/"):
        store.delete([listed_object.key for listed_object in store.list(key)])
    else:
        store.delete([key])


def find_gc_strategy(artifact: dict[str, Any], spec: dict[str, Any]) -> str:
    """Return the garbage collection strategy of an artifact. If the artifact has no strategy,
    return the strategy of the workflow, or "Never" if the workflow has no strategy either."""
    strategies = (
        (strategy_owner.get("artifactGC") or {}).get("strategy")
        for strategy_owner in (artifact, spec)
    )
    return next(filter(None, strategies), "Never")


def check_artifacts(template: dict[str, Any], field_path: str) -> None:
    """Raise ConfigError for an artifact of a pod without a path, an artifact with a path in a
    template that has no pod, or an invalid gzip level."""
    is_pod = not template.keys() & {"dag", "steps", "suspend"}
    artifacts = {
        direction: (template.get(direction) or {}).get("artifacts") or []
        for direction in ("inputs", "outputs")
    }
    volume_mounts = (template.get("container") or template.get("script") or {}).get(
        "volumeMounts"
    ) or []
    mount_paths = [
        *(volume_mount.get("mountPath") for volume_mount in volume_mounts),
        *(artifact.get("path") for artifact in artifacts["inputs"]),
    ]

    numbered_artifacts = [
        (f"{direction}.artifacts[{index}]", artifact)
        for direction in artifacts
        for index, artifact in enumerate(artifacts[direction])
    ]
    for artifact_field, artifact in numbered_artifacts:
        path = artifact.get("path")
        artifact_path = f"{field_path}.{artifact_field}"
        if is_pod and not path:
            raise ConfigError(f"{artifact_path}.path is missing: set it.")

        if path and not is_pod:
            raise ConfigError(
                f"{artifact_path}.path is {path!r}, but only pods have files. Remove the path."
            )

        compression_level = ((artifact.get("archive") or {}).get("tar") or {}).get(
            "compressionLevel"
        )
        is_in_mount = artifact_field.startswith("outputs") and any(
            mount_path and Path(path).is_relative_to(mount_path) for mount_path in mount_paths
        )
        if is_in_mount and compression_level is not None and compression_level not in range(-2, 10):
            raise ConfigError(
                f"{artifact_path}.archive.tar.compressionLevel is {compression_level!r}: it must"
                " be from -2 to 9."
            )


def _read_owner_id(path: Path) -> int | None:
    """Return the user id of a file's owner, or None if the file does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_uid
    return None


def remove_directory(root: Path) -> None:
    """Remove a pod's directory, which another thread may be removing at the same time. If the
    directory belongs to another user, files that cannot be removed are left without an error."""
    may_remove = os.getuid() in (0, _read_owner_id(root))

    def on_error(_function: Any, _path: str, error: Any) -> None:
        if may_remove and not isinstance(error[1], FileNotFoundError):
            raise error[1]

    try:
        shutil.rmtree(root, onerror=on_error)
    except PermissionError:  # the tree contains a read-only directory, as in Go's module cache
        os.chmod(root, 0o700)
        for folder, entry_names, _ in os.walk(root):
            for path in (os.path.join(folder, entry_name) for entry_name in entry_names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)

        shutil.rmtree(root, onerror=on_error)
