"""Copy artifacts between a pod's directory and the object store, with Argo's keys and archives.

An artifact without `archive` is unpacked if it is a gzipped tar. If a tar has a single entry, the
entry is moved to the artifact's path.

Source: Argo's executor.go (loadArtifact, unpack, saveArtifact).
"""

import contextlib
import gzip
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argolocal.errors import ArgolocalError, ConfigError, NotFound, StorageError
from argolocal.manifest.allowed_values import ARTIFACT_GC
from argolocal.pods import archives, web
from argolocal.store import ObjectStore

# returns the ObjectStore of an `s3` location
OpenStore = Callable[..., Any]
# Argo's executor copies files into this directory before it zips them
STAGING_PATH = "/tmp/argo/outputs/artifacts"


class Tar(tarfile.TarFile):
    """A tar that stores hard links as full files, as Go does."""

    def gettarinfo(self, *args: Any, **kwargs: Any) -> tarfile.TarInfo:
        self.inodes.clear()  # pyright: ignore
        return super().gettarinfo(*args, **kwargs)


class ArtifactError(Exception):
    """An artifact cannot be loaded or saved. The message equals Argo's."""


def load(artifact: dict[str, Any], path: Path, store: OpenStore) -> None:
    """Load an input artifact to `path`. Raises ArtifactError, StorageError."""
    # an artifact has no location if it is the output of a skipped step
    if not any(artifact.get(kind) for kind in ("s3", "raw", "http")):
        if artifact.get("optional"):
            return

        raise ArtifactError(f"required artifact '{artifact['name']}' not supplied")

    path.parent.mkdir(parents=True, exist_ok=True)
    downloaded_file = path.with_name(path.name + ".tmp")

    if artifact.get("raw"):
        downloaded_file.write_text(artifact["raw"]["data"])
        # all users may write to the file, as in Argo, whose executor runs without a umask
        downloaded_file.chmod(0o666)
    elif artifact.get("http"):
        _download(artifact, downloaded_file)
    else:
        try:
            store(artifact["s3"]).download(artifact["s3"]["key"], downloaded_file)
        except StorageError as error:
            if artifact.get("optional") and isinstance(error, NotFound):
                # create this directory, as the kubelet of a cluster would do for the mount point
                path.mkdir(exist_ok=True)
                return

            raise ArtifactError(f"artifact {artifact['name']} failed to load: {error}") from None

    archive = artifact.get("archive") or {}
    try:
        if "zip" in archive:
            archives.unpack_zip(downloaded_file, path)
        elif "none" not in archive and ("tar" in archive or archives.is_tarball(downloaded_file)):
            archives.unpack_tar(downloaded_file, path)
        else:
            downloaded_file.replace(path)
    except archives.ArchiveError as error:
        raise ArtifactError(str(error)) from error

    if artifact.get("mode") is not None:
        for entry in [path, *(path.rglob("*") if artifact.get("recurseMode") else ())]:
            if not entry.is_symlink():
                entry.chmod(int(artifact["mode"]))


def _download(artifact: dict[str, Any], target: Path) -> None:
    http = artifact["http"]
    headers = [(header["name"], header["value"]) for header in http.get("headers") or []]
    # drop a Host header, because Go's HTTP client ignores it
    headers = [header for header in headers if header[0].lower() != "host"]
    message = f"artifact {artifact['name']} failed to load"

    try:
        with web.request(http["url"], headers=headers, timeout=60) as response:
            if not 200 <= response.status < 300:
                url = web.hide_password(http["url"])
                raise ArtifactError(f"{message}: {url}: {response.status} {response.reason}")

            max_bytes = int(archives.MAX_DISK_SHARE * shutil.disk_usage(target.parent).free)
            with target.open("wb") as file:
                web.copy(response, file, max_bytes)
    except (web.WebError, OSError) as error:
        # this OSError means that the local file cannot be written
        raise ArtifactError(f"{message}: {error}") from None


def save(
    artifact: dict[str, Any],
    link: Path,
    path: Path,
    folder: Path,
    pod: str,
    workflow: str,
    store: OpenStore,
    location: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Upload an output artifact. Return the artifact with its key, or None if an optional artifact
    is missing.

    `link`: path of the artifact in the template. It may be a link to `path`. `folder`: directory
    for temporary archives. `location`: `s3` of the template's archiveLocation, the default
    location. Raises ArtifactError.
    """
    archive = artifact.get("archive") or {}

    failed_call = _find_failing_call(artifact, link, path)
    if failed_call:
        if artifact.get("optional"):
            return None

        raise ArtifactError(f"{failed_call}: no such file or directory")

    if not (path.is_file() or path.is_dir()):
        raise ArtifactError(f"{artifact['path']} is not a regular file or directory")

    name = link.name
    file = path

    if "zip" in archive:
        name = f"{artifact['name']}.zip"
        file = folder / f".{artifact['name']}.zip"
        _zip(path, file, artifact["name"])
    elif "none" not in archive:
        name = f"{artifact['name']}.tgz"
        file = folder / f".{artifact['name']}.tgz"

        requested_level = (archive.get("tar") or {}).get("compressionLevel")
        # as in Argo, an invalid gzip level is ignored; `check` rejects it for files in volumes
        if isinstance(requested_level, int) and requested_level in range(10):
            level = requested_level
        else:
            level = 6

        with (
            gzip.GzipFile(file, "wb", level, mtime=0) as zipped,
            Tar.open(fileobj=zipped, mode="w") as tar,
        ):
            tar.add(link if path.is_dir() else path, arcname=link.name)

    artifact_location = artifact.get("s3") or {}
    base = _default_location(location, f"{workflow}/{pod}")
    target = {**base, "key": f"{base['key']}/{name}"} | artifact_location

    if artifact_location.get("endpoint") and artifact_location.get("bucket"):
        target = {**artifact_location, "key": target["key"]}

    key = target["key"]
    try:
        store(target).upload(file, key, links=False)
    except StorageError as error:
        raise ArtifactError(f"artifact {artifact['name']} failed to save: {error}") from None
    finally:
        if file != path:
            file.unlink()

    return {**artifact, "s3": target}


def _find_failing_call(artifact: dict[str, Any], link: Path, path: Path) -> str:
    """Return the system call that would fail in Argo's executor, or "". For example, Argo can zip a
    file only if its name is the artifact's name."""
    archive = artifact.get("archive") or {}
    if not path.exists():
        return f"open /var/run/argo/outputs/artifacts{artifact['path']}.tgz"
    if "none" in archive and path.is_dir() and link.is_symlink():
        return f"open {STAGING_PATH}/{link.name}"
    is_missing = "zip" in archive and path.is_file() and link.name != artifact["name"]
    if is_missing:
        return f"stat {STAGING_PATH}/{artifact['name']}"
    return ""


def _default_location(location: dict[str, Any] | None, prefix: str) -> dict[str, Any]:
    """Return the default location of artifacts: a complete archiveLocation, or the default
    repository."""
    is_complete = location and all(location.get(key) for key in ("endpoint", "bucket", "key"))
    if location and is_complete:
        return dict(location)
    return {"key": prefix}


def save_log(
    container: str, log: Path, template: dict[str, Any], prefix: str, store: OpenStore
) -> dict[str, Any]:
    """Upload a container's log. Return the artifact with its key. Raises StorageError."""
    base = _default_location(template["archiveLocation"].get("s3"), prefix)
    target = {**base, "key": f"{base['key']}/{container}.log"}
    store(target).upload(log, target["key"])
    return {"name": f"{container}-logs", "s3": target}


def _zip(path: Path, zip_path: Path, name: str) -> None:
    """Zip a directory or file. In the zip, a directory has the artifact's name and contains no
    empty directories, and a file is below Argo's staging path."""
    with zipfile.ZipFile(zip_path, "w", zipfile.ZIP_DEFLATED) as archive:
        if path.is_file():
            entry = zipfile.ZipInfo.from_file(path)
            entry.filename = f"{STAGING_PATH}/{name}"
            with archive.open(entry, "w") as target, path.open("rb") as file:
                shutil.copyfileobj(file, target)
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
            archive.write(file, Path(name) / file.relative_to(path))


def collect_garbage(status: dict[str, Any], spec: dict[str, Any], store: OpenStore) -> list[str]:
    """Delete the output artifacts with the strategy OnWorkflowCompletion. Return the ids of the
    changed nodes.

    Failures are recorded as a condition of the status. OnWorkflowDeletion has no effect here,
    because workflows are never deleted. As in Argo's S3 driver, a key with a trailing / is a
    directory. Source: Argo's artifact_gc.go.
    """
    changed_ids = []

    for id, node in status["nodes"].items():
        for artifact in (
            ((node.get("outputs") or {}).get("artifacts") or []) if node["type"] == "Pod" else ()
        ):
            if (
                artifact.get("deleted")
                or strategy(artifact, spec) != ARTIFACT_GC[0]
                or not artifact.get("s3")
            ):
                continue

            try:
                _delete(artifact["s3"]["key"], store(artifact["s3"]))
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
                changed_ids.append(id)

    return changed_ids


def _delete(key: str, store: ObjectStore) -> None:
    store.delete([entry.key for entry in store.list(key)] if key.endswith("/") else [key])


def strategy(artifact: dict[str, Any], spec: dict[str, Any]) -> str:
    """Return the garbage collection strategy of an artifact, or else of the workflow."""
    strategies = ((owner.get("artifactGC") or {}).get("strategy") for owner in (artifact, spec))
    return next(filter(None, strategies), "Never")


def check(template: dict[str, Any], where: str) -> None:
    """Raise ConfigError for an artifact that has no path, a path outside of the pod, or an invalid
    gzip level."""
    is_pod = not template.keys() & {"dag", "steps", "suspend"}
    artifacts = {
        kind: (template.get(kind) or {}).get("artifacts") or [] for kind in ("inputs", "outputs")
    }
    mounts = (template.get("container") or template.get("script") or {}).get("volumeMounts") or []
    mount_paths = [
        *(entry.get("mountPath") for entry in mounts),
        *(entry.get("path") for entry in artifacts["inputs"]),
    ]

    numbered_artifacts = [
        (f"{kind}.artifacts[{index}]", artifact)
        for kind in artifacts
        for index, artifact in enumerate(artifacts[kind])
    ]
    for name, artifact in numbered_artifacts:
        path = artifact.get("path")
        field = f"{where}.{name}"
        if is_pod and not path:
            raise ConfigError(f"{field}.path is missing: set it.")

        if path and not is_pod:
            raise ConfigError(
                f"{field}.path is {path!r}, but only pods have files. Remove the path."
            )

        level = ((artifact.get("archive") or {}).get("tar") or {}).get("compressionLevel")
        in_mount = name.startswith("outputs") and any(
            mount and Path(path).is_relative_to(mount) for mount in mount_paths
        )
        if in_mount and level is not None and level not in range(-2, 10):
            raise ConfigError(
                f"{field}.archive.tar.compressionLevel is {level!r}: it must be from -2 to 9."
            )


def _owner(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_uid
    return None


def remove_directory(root: Path) -> None:
    """Remove a pod's directory, which another thread may be removing at the same time."""
    may_remove = os.getuid() in (0, _owner(root))

    def on_error(_function: Any, _path: str, error: Any) -> None:
        if may_remove and not isinstance(error[1], FileNotFoundError):
            raise error[1]

    try:
        shutil.rmtree(root, onerror=on_error)
    except PermissionError:  # the tree contains a read-only directory, as in Go's module cache
        os.chmod(root, 0o700)
        for folder, names, _ in os.walk(root):
            for path in (os.path.join(folder, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)

        shutil.rmtree(root, onerror=on_error)
