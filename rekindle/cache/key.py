"""The key of a step's outputs: a hash over all that they are a function of."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rekindle.cache import code
from rekindle.errors import RekindleError
from rekindle.step import StepInputs, is_artifact, load, to_text

if TYPE_CHECKING:
    from rekindle.storage import Store


class Unknown(RekindleError):
    """A step has no key here, and why."""


Facts = dict[str, Any]
Bucket = Callable[[str], "Store"]


def _bucket(name: str) -> "Store":
    from rekindle.storage import Store

    return Store(name, os.environ.get("S3_ENDPOINT_URL") or None)


def facts(
    module: str,
    inputs: StepInputs,
    artifacts: Mapping[str, str],
    identity: str = "",
    here: bool = True,
    bucket: Bucket | None = None,
) -> Facts:
    """What the outputs of a step are a function of: its inputs, its code, and the content of what it reads.

    `artifacts`: the digests of its input artifacts; `identity`: that of its code (empty: as this process would run
    it). Raises Unknown; so if it reads a path, and it would not run `here`.
    """
    rule = load(module).REUSE
    fields = type(inputs).model_fields
    keyed = [name for name in fields if name not in rule.aside and not is_artifact(fields[name])]
    values = {name: to_text(getattr(inputs, name)) for name in keyed}
    workload = [str(getattr(inputs, "workload"))] if "workload" in fields else []  # noqa: B009
    reads = {uri: content(uri, here, bucket or _bucket) for uri in rule.reads(inputs)}
    ours = identity or code.here([module, *workload])
    return {"step": module, "code": ours, "inputs": values, "artifacts": dict(artifacts), "reads": reads}


def key(known: Facts) -> str:
    """sha256 over facts."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def content(uri: str, here: bool = True, bucket: Bucket = _bucket) -> str:
    """A digest of what is at a path or s3:// URI; that of a URI which makes its own data is the URI. Raises Unknown."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        entries = [[entry.key, entry.size, entry.etag] for entry in bucket(parts.netloc).list(parts.path.lstrip("/"))]
        if not entries:
            raise Unknown(f"{uri} is not there")
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    if parts.scheme in ("http", "https", "ftp"):
        raise Unknown(f"nobody knows whether {uri} is still what it was")
    if "://" in uri and parts.scheme != "file":
        return uri
    path = Path(uri.removeprefix("file://"))
    if not here:
        raise Unknown(f"{path} is a path of the pod, which is not seen from here")
    if not path.exists():
        raise Unknown(f"{path} is not there")
    return digest(path)["sha256"]


def digest(path: Path) -> dict[str, Any]:
    """sha256 over the names and bytes of a file or folder, the number of its files and their bytes."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    sums = []
    for file in files:
        with file.open("rb") as opened:
            sums.append((str(file.relative_to(path)), hashlib.file_digest(opened, "sha256").hexdigest()))
    size = sum(file.stat().st_size for file in files)
    return {"sha256": hashlib.sha256(json.dumps(sums).encode()).hexdigest(), "files": len(files), "bytes": size}
