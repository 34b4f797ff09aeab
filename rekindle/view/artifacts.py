"""Artifacts of runs and input data in the object store of this machine."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from argolocal.state.journal import RunFiles
from argolocal.view import runs as overview
from argolocal.view.summary import FINISHED
from rekindle.cache.plan import reused_tasks
from rekindle.errors import ConfigError, NotFound, did_you_mean
from rekindle.local.cluster import LocalCluster


def list_artifacts(home: Path, run: str) -> list[dict[str, Any]]:
    """Return the artifacts of a run, with their number of files and bytes. Raises ConfigError without artifacts."""
    prefix = f"{run}/"
    files, sizes = Counter[str](), Counter[str]()
    for entry in LocalCluster(home).store().list(prefix):
        name = "/".join(entry.key.removeprefix(prefix).split("/")[:2])  # TASK/ARTIFACT, see rekindle/keys.py
        files[name] += 1
        sizes[name] += entry.size
    if not files:
        raise ConfigError(f'the run "{run}" does not have artifacts: `rekindle status` lists the runs.')
    return [{"artifact": name, "files": files[name], "bytes": sizes[name]} for name in files]


def find_old_runs(home: Path, keep: int) -> list[dict[str, Any]]:
    """Return the runs that have ended and are not among the newest `keep` of their pipeline, with their bytes.

    A run is kept if a kept run reuses its outputs. Releases do not need their run: they are copies.
    """
    store, finished_counts, rows, reused_runs = LocalCluster(home).store(), Counter[str](), [], set[str]()
    for name in overview.names(home):  # `names` yields the newest run first
        workflow = RunFiles(home, name).workflow()
        labels = workflow["metadata"].get("labels") or {}
        pipeline = labels.get("app.kubernetes.io/name") or name.rpartition("-")[0] or name
        phase = overview.state(home, name)["phase"]
        finished_counts[pipeline] += phase in FINISHED
        if phase not in FINISHED or finished_counts[pipeline] <= keep or name in reused_runs:
            reused_runs |= {location.partition("/")[0] for location in reused_tasks(workflow).values()}
        else:
            files = (path.lstat().st_size for path in RunFiles(home, name).root.rglob("*"))
            size = sum(files) + sum(entry.size for entry in store.list(f"{name}/"))
            rows.append({"run": name, "phase": phase, "bytes": size})
    return rows


def remove_run(home: Path, name: str) -> None:
    """Remove a run from this machine: its artifacts, then its logs and its history. Raises Busy if it is running."""
    files, store = RunFiles(home, name), LocalCluster(home).store()
    files.lock()
    try:
        store.delete([entry.key for entry in store.list(f"{name}/")])
        shutil.rmtree(files.root)
    finally:
        files.close()


def fetch(home: Path, run: str, artifact: str, target: Path) -> None:
    """Copy an artifact, or part of one (`prepare/dataset/rejects.parquet`), to `target`. Raises ConfigError."""
    if target.exists():
        raise ConfigError(f"{target} exists already: move it away, or give another path with --to.")
    try:
        LocalCluster(home).store().download(f"{run}/{artifact.strip('/')}", target)
    except NotFound as error:
        names = [row["artifact"] for row in list_artifacts(home, run)]
        raise ConfigError(
            f'"{artifact}" is not an artifact of {run}.{did_you_mean(artifact, names)} The run has {", ".join(names)}; '
            "give one of these artifacts, or a path inside an artifact."
        ) from error


def put(home: Path, path: Path, uri: str) -> str:
    """Copy a file or folder to an s3:// URI (default: data/NAME in the bucket of the runs); returns the URI.

    Raises ConfigError.
    """
    if not path.exists():
        siblings = {str(sibling) for sibling in path.parent.glob("*")}
        raise ConfigError(f"{path} does not exist: give a file or a folder.{did_you_mean(str(path), siblings)}")
    store = LocalCluster(home).store()
    parts = urlsplit(uri or store.uri(f"data/{path.resolve().name}"))
    if parts.scheme != "s3" or parts.netloc != store.bucket or not parts.path.strip("/"):
        raise ConfigError(f"{uri} is not a valid target: it must be s3://{store.bucket}/KEY.")
    store.upload(path, parts.path.strip("/"))
    return parts.geturl()
