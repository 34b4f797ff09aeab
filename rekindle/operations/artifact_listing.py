"""List, fetch and upload artifacts and input data in the object store of this machine."""

from collections import Counter
from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError, NotFound, did_you_mean
from rekindle.local.cluster import LocalCluster
from rekindle.names import RunName, parse_s3_address
from rekindle.release.retention.ownership import mark_key


def list_artifacts(home: Path, run: str) -> list[dict[str, Any]]:
    """Return the artifacts of a run, with their number of files and bytes. Raises ConfigError if
    the run has no artifacts."""
    prefix = f"{run}/"
    files = Counter[str]()
    sizes = Counter[str]()

    for entry in LocalCluster(home).store().list(prefix):
        if entry.key == mark_key(RunName(run)):
            continue

        # TASK/ARTIFACT, see rekindle/keys.py
        name = "/".join(entry.key.removeprefix(prefix).split("/")[:2])
        files[name] += 1
        sizes[name] += entry.size

    if not files:
        raise ConfigError(
            f'the run "{run}" does not have artifacts: `rekindle status` lists the runs.'
        )

    return [{"artifact": name, "files": files[name], "bytes": sizes[name]} for name in files]


def fetch(home: Path, run: str, artifact: str, target: Path) -> None:
    """Copy an artifact, or part of one (`prepare/dataset/rejects.parquet`), to `target`. Raises
    ConfigError."""
    if target.exists():
        raise ConfigError(f"{target} exists already: move it away, or give another path with --to.")

    try:
        LocalCluster(home).store().download(f"{run}/{artifact.strip('/')}", target)
    except NotFound as error:
        names = [row["artifact"] for row in list_artifacts(home, run)]
        raise ConfigError(
            f'"{artifact}" is not an artifact of {run}.{did_you_mean(artifact, names)} The run has'
            f" {', '.join(names)}; give one of these artifacts, or a path inside an artifact."
        ) from error


def put(home: Path, path: Path, uri: str) -> str:
    """Copy a file or folder to an s3:// URI (default: data/NAME in the bucket of the runs), and
    return the URI. Raises ConfigError."""
    if not path.exists():
        siblings = {str(sibling) for sibling in path.parent.glob("*")}
        raise ConfigError(
            f"{path} does not exist: give a file or a folder.{did_you_mean(str(path), siblings)}"
        )

    store = LocalCluster(home).store()
    target = uri or store.uri(f"data/{path.resolve().name}")
    address = parse_s3_address(target)
    if not address or address.bucket != store.bucket or not address.key.strip("/"):
        raise ConfigError(f"{uri} is not a valid target: it must be s3://{store.bucket}/KEY.")

    store.upload(path, address.key.strip("/"))
    return target
