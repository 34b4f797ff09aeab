"""Artifacts between a pod's directory and the S3 store: the keys, archives and surprises of Argo.

On loading an artifact without `archive`, a gzipped tar is found out and unpacked, and if it holds one thing only,
that thing gets the artifact's path. Source: Argo's executor.go (loadArtifact, unpack, saveArtifact).
"""

import contextlib
import gzip
import os
import shutil
import tarfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from rekindle.argo.kinds import ARTIFACT_GC
from rekindle.errors import ConfigError, RekindleError, StorageError

STAGED = "/tmp/argo/outputs/artifacts"  # where Argo's executor puts a file that it zips, and looks by its name


class Tar(tarfile.TarFile):
    """With the whole of each file, as Go writes it, also of what is a second name of one."""

    def gettarinfo(self, *args: Any, **kwargs: Any) -> tarfile.TarInfo:
        self.inodes.clear()  # pyright: ignore
        return super().gettarinfo(*args, **kwargs)


class ArtifactError(Exception):
    """An artifact that cannot be loaded or saved; the text is Argo's."""


def load(artifact: dict[str, Any], path: Path, store: Any) -> None:
    """Brings an input artifact to `path`. Raises ArtifactError, StorageError."""
    if not any(artifact.get(kind) for kind in ("s3", "raw", "http")):  # as of a step that was skipped
        if artifact.get("optional"):
            return
        raise ArtifactError(f"required artifact '{artifact['name']}' not supplied")
    path.parent.mkdir(parents=True, exist_ok=True)
    fetched = path.with_name(path.name + ".tmp")
    if artifact.get("raw"):
        fetched.write_text(artifact["raw"]["data"])
        fetched.chmod(0o666)  # Argo's executor has no umask
    elif artifact.get("http"):
        _get(artifact, fetched)
    else:
        from rekindle.storage import NotFound

        try:
            store(artifact["s3"]).download(artifact["s3"]["key"], fetched)
        except NotFound as error:
            if artifact.get("optional"):
                path.mkdir(exist_ok=True)  # where the kubelet would have mounted it
                return
            raise ArtifactError(f"artifact {artifact['name']} failed to load: {error}") from None
        except StorageError as error:
            raise ArtifactError(f"artifact {artifact['name']} failed to load: {error}") from None
    archive = artifact.get("archive") or {}
    if "zip" in archive:
        _unpack(fetched, path, lambda into: zipfile.ZipFile(fetched).extractall(into))
    elif "none" not in archive and ("tar" in archive or _tarball(fetched)):
        _unpack(fetched, path, lambda into: _untar(fetched, into))
    else:
        fetched.replace(path)
    if artifact.get("mode") is not None:
        for entry in [path, *(path.rglob("*") if artifact.get("recurseMode") else ())]:
            entry.chmod(int(artifact["mode"]))


def _get(artifact: dict[str, Any], into: Path) -> None:
    http = artifact["http"]
    headers = {header["name"]: header["value"] for header in http.get("headers") or []}
    try:
        request = urllib.request.Request(http["url"], headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer, into.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"artifact {artifact['name']} failed to load: {http['url']}: {error}") from None


def _tarball(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with tarfile.open(path, "r:gz") as archive:
            return archive.next() is not None
    except (tarfile.TarError, OSError, EOFError):
        return False


def _untar(path: Path, into: Path) -> None:
    root = os.path.realpath(into)

    def sanitized(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """As Argo's executor takes it: links that stay within, and files and directories without an owner."""
        target = os.path.normpath(os.path.join(root, member.name))
        if not target.startswith(f"{root}/"):
            raise ArtifactError(f"illegal file path: {member.name}")
        if member.issym():
            if not os.path.normpath(os.path.join(os.path.dirname(target), member.linkname)).startswith(f"{root}/"):
                raise ArtifactError(f"illegal symlink target: {member.name} -> {member.linkname}")
            return member
        if not f"{os.path.realpath(os.path.dirname(target))}/".startswith(f"{root}/"):
            raise ArtifactError(
                f"illegal file path after symlink resolution: {member.name} resolves outside destination"
            )
        mode = 0o755 if member.isdir() else member.mode & 0o777
        member.mode, member.uid, member.gid, member.uname, member.gname = mode, os.getuid(), os.getgid(), "", ""
        return member if member.isdir() or member.isreg() else None

    with tarfile.open(path, "r:gz") as archive:
        archive.extraction_filter = lambda member, _: member  # Python before 3.11.4 has none
        archive.extractall(into, (member for entry in archive if (member := sanitized(entry))))


def _unpack(archive: Path, path: Path, extract: Any) -> None:
    unpacked = path.with_name(path.name + ".tmpdir")
    unpacked.mkdir()
    try:
        extract(unpacked)
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise ArtifactError(f"{path.name} cannot be unpacked: {error}") from error
    archive.unlink()
    entries = list(unpacked.iterdir())
    (entries[0] if len(entries) == 1 else unpacked).rename(path)
    if len(entries) == 1:
        unpacked.rmdir()


def save(
    artifact: dict[str, Any],
    link: Path,
    path: Path,
    into: Path,
    pod: str,
    workflow: str,
    store: Any,
    location: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Uploads an output artifact and gives it with its key; None if it is optional and absent. Raises ArtifactError.

    `link`: what the template names, which as a rule is the file at `path` itself, but may lead to it. `into`: where it
    is packed.
    `location`: the S3 place of the template's archiveLocation, for what does not say where it goes itself.
    """
    archive = artifact.get("archive") or {}
    if missing := _missing_path(artifact, link, path):
        if artifact.get("optional"):
            return None
        raise ArtifactError(f"{missing}: no such file or directory")
    if not (path.is_file() or path.is_dir()):
        raise ArtifactError(f"{artifact['path']} is not a regular file or directory")
    name, packed = link.name, path
    if "zip" in archive:
        name, packed = f"{artifact['name']}.zip", into / f".{artifact['name']}.zip"
        _zip(path, packed, artifact["name"])
    elif "none" not in archive:
        name, packed = f"{artifact['name']}.tgz", into / f".{artifact['name']}.tgz"
        level = _level(archive)
        with gzip.GzipFile(packed, "wb", level, mtime=0) as zipped, Tar.open(fileobj=zipped, mode="w") as tar:
            tar.add(link if path.is_dir() else path, arcname=link.name)
    own, base = artifact.get("s3") or {}, _base(location, f"{workflow}/{pod}")
    where = {**base, "key": f"{base['key']}/{name}"} | own
    if own.get("endpoint") and own.get("bucket"):
        where = {**own, "key": where["key"]}
    key = where["key"]
    try:
        store(where).upload(packed, key, links=False)
    except StorageError as error:
        raise ArtifactError(f"artifact {artifact['name']} failed to save: {error}") from None
    finally:
        if packed != path:
            packed.unlink()
    return {**artifact, "s3": where}


def _level(archive: dict[str, Any]) -> int:
    """Argo takes notice of it for what lies in a volume alone, where `check` has seen it."""
    level = (archive.get("tar") or {}).get("compressionLevel")
    return level if isinstance(level, int) and level in range(10) else 6


def _missing_path(artifact: dict[str, Any], link: Path, path: Path) -> str:
    """What Argo looks for in vain, if it does; a file that it zips it looks for by the name of its artifact."""
    archive = artifact.get("archive") or {}
    if not path.exists():
        return f"open /var/run/argo/outputs/artifacts{artifact['path']}.tgz"
    if "none" in archive and path.is_dir() and link.is_symlink():
        return f"open {STAGED}/{link.name}"
    lost = "zip" in archive and path.is_file() and link.name != artifact["name"]
    return f"stat {STAGED}/{artifact['name']}" if lost else ""


def _base(location: dict[str, Any] | None, prefix: str) -> dict[str, Any]:
    """Where artifacts go that do not say it: an archiveLocation that is whole, or the default repository."""
    whole = location and all(location.get(part) for part in ("endpoint", "bucket", "key"))
    return dict(location) if location and whole else {"key": prefix}


def save_log(container: str, log: Path, template: dict[str, Any], prefix: str, store: Any) -> dict[str, Any]:
    """Uploads what a container said, and gives it as an artifact. Raises StorageError."""
    base = _base(template["archiveLocation"].get("s3"), prefix)
    where = {**base, "key": f"{base['key']}/{container}.log"}
    store(where).upload(log, where["key"])
    return {"name": f"{container}-logs", "s3": where}


def _zip(path: Path, into: Path, name: str) -> None:
    """A directory goes by the artifact's name and without empty ones, a file by where Argo has it."""
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        if path.is_file():
            entry = zipfile.ZipInfo.from_file(path)
            entry.filename = f"{STAGED}/{name}"
            with archive.open(entry, "w") as target, path.open("rb") as file:
                shutil.copyfileobj(file, target)
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
            archive.write(file, Path(name) / file.relative_to(path))


def collect_garbage(status: dict[str, Any], spec: dict[str, Any], store: Any) -> list[str]:
    """Deletes the output artifacts that go with the completion of their workflow; gives the nodes that change by it.

    What cannot be deleted is a condition of the status. One machine never deletes a workflow: what is to go with its
    deletion stays. Source: Argo's artifact_gc.go and the S3 driver, which takes a key for a directory by its last /.
    """
    changed = []
    for id, node in status["nodes"].items():
        for artifact in ((node.get("outputs") or {}).get("artifacts") or []) if node["type"] == "Pod" else ():
            if artifact.get("deleted") or strategy(artifact, spec) != ARTIFACT_GC[0] or not artifact.get("s3"):
                continue
            try:
                _delete(artifact["s3"]["key"], store(artifact["s3"]))
            except (RekindleError, KeyError) as error:
                others = [
                    condition for condition in status.get("conditions", []) if condition["type"] != "ArtifactGCError"
                ]
                failed = {"type": "ArtifactGCError", "status": "True", "message": str(error)}
                status["conditions"] = [*others, failed]
            else:
                artifact["deleted"] = True
                changed.append(id)
    return changed


def _delete(key: str, store: Any) -> None:
    store.delete([entry.key for entry in store.list(key)] if key.endswith("/") else [key])


def strategy(artifact: dict[str, Any], spec: dict[str, Any]) -> str:
    """When an artifact is deleted: its own strategy, else that of the workflow."""
    strategies = ((owner.get("artifactGC") or {}).get("strategy") for owner in (artifact, spec))
    return next(filter(None, strategies), "Never")


def check(template: dict[str, Any], where: str) -> None:
    """Raises ConfigError for an artifact without a path where pods are, or with one elsewhere, and a gzip level."""
    leaf = not template.keys() & {"dag", "steps", "suspend"}
    files = {way: (template.get(way) or {}).get("artifacts") or [] for way in ("inputs", "outputs")}
    mounts = (template.get("container") or template.get("script") or {}).get("volumeMounts") or []
    own = [*(entry.get("mountPath") for entry in mounts), *(entry.get("path") for entry in files["inputs"])]
    numbered = [(f"{way}.artifacts[{index}]", artifact) for way in files for index, artifact in enumerate(files[way])]
    for which, artifact in numbered:
        path, place = artifact.get("path"), f"{where}.{which}"
        if leaf and not path:
            raise ConfigError(f"{place}.path is missing: give it.")
        if path and not leaf:
            raise ConfigError(f"{place}.path is {path!r}, but only pods have files. Remove it.")
        level = ((artifact.get("archive") or {}).get("tar") or {}).get("compressionLevel")
        staged = which.startswith("outputs") and any(at and Path(path).is_relative_to(at) for at in own)
        if staged and level is not None and level not in range(-2, 10):
            raise ConfigError(f"{place}.archive.tar.compressionLevel is {level!r}: it must be from -2 to 9.")


def _owner(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_uid
    return None


def remove_directory(root: Path) -> None:
    """Removes a pod's directory; what lies there is in the store by now. A thread that collects may do so, too."""
    ours = os.getuid() in (0, _owner(root))

    def failed(_function: Any, _path: str, error: Any) -> None:
        if ours and not isinstance(error[1], FileNotFoundError):
            raise error[1]

    try:
        shutil.rmtree(root, onerror=failed)
    except PermissionError:  # directories that it made read only, as Go's module cache is
        os.chmod(root, 0o700)
        for folder, names, _ in os.walk(root):
            for path in (os.path.join(folder, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(root, onerror=failed)
