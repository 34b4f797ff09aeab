"""List, fetch and upload artifacts and input data in the object store of this machine."""

from collections import Counter
from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError, NotFound, suggest_similar
from rekindle.local.cluster import LocalCluster
from rekindle.names import RunName, parse_s3_address
from rekindle.release.retention.ownership import make_mark_key


def list_artifacts(home_folder: Path, run_name: str) -> list[dict[str, Any]]:
    """Return the artifacts of a run, with their number of files and bytes. Raises ConfigError if
    the run has no artifacts."""
    run_prefix = f"{run_name}/"
    file_counts = Counter[str]()
    byte_counts = Counter[str]()

    for object_entry in LocalCluster(home_folder).store().list(run_prefix):
        if object_entry.key == make_mark_key(RunName(run_name)):
            continue

        # TASK/ARTIFACT, see rekindle/keys.py
        artifact_name = "/".join(object_entry.key.removeprefix(run_prefix).split("/")[:2])
        file_counts[artifact_name] += 1
        byte_counts[artifact_name] += object_entry.size

    if not file_counts:
        raise ConfigError(
            f'the run "{run_name}" does not have artifacts: `rekindle status` lists the runs.'
        )

    return [
        {
            "artifact": artifact_name,
            "files": file_counts[artifact_name],
            "bytes": byte_counts[artifact_name],
        }
        for artifact_name in file_counts
    ]


def fetch_artifact(home_folder: Path, run_name: str, artifact_path: str, target_path: Path) -> None:
    """Copy an artifact, or part of one (`prepare/dataset/rejects.parquet`), to `target_path`.
    Raises ConfigError."""
    if target_path.exists():
        raise ConfigError(
            f"{target_path} exists already: move it away, or give another path with --to."
        )

    try:
        LocalCluster(home_folder).store().download(
            f"{run_name}/{artifact_path.strip('/')}", target_path
        )
    except NotFound as error:
        artifact_names = [
            artifact_row["artifact"] for artifact_row in list_artifacts(home_folder, run_name)
        ]
        raise ConfigError(
            f'"{artifact_path}" is not an artifact of'
            f" {run_name}.{suggest_similar(artifact_path, artifact_names)} The run has"
            f" {', '.join(artifact_names)}; give one of these artifacts, or a path inside an"
            " artifact."
        ) from error


def upload_path(home_folder: Path, source_path: Path, target_uri: str) -> str:
    """Copy a file or folder to an s3:// URI (default: data/NAME in the bucket of the runs), and
    return the URI. Raises ConfigError."""
    if not source_path.exists():
        sibling_paths = {str(sibling_path) for sibling_path in source_path.parent.glob("*")}
        raise ConfigError(
            f"{source_path} does not exist: give a file or a"
            f" folder.{suggest_similar(str(source_path), sibling_paths)}"
        )

    object_store = LocalCluster(home_folder).store()
    upload_uri = target_uri or object_store.uri(f"data/{source_path.resolve().name}")
    s3_address = parse_s3_address(upload_uri)
    if not s3_address or s3_address.bucket != object_store.bucket or not s3_address.key.strip("/"):
        raise ConfigError(
            f"{target_uri} is not a valid target: it must be s3://{object_store.bucket}/KEY."
        )

    object_store.upload(source_path, s3_address.key.strip("/"))
    return upload_uri
