"""The cache key of a step: a hash of its inputs, its code and the data that it reads."""

import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argolocal.common.addresses import format_address
from argolocal.common.json_text import to_json
from rekindle.cache import code, loaded
from rekindle.content.hashes import linked_files_below
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import S3_ENDPOINT_URL
from rekindle.names import parse_s3_address, split_address
from rekindle.step import StepInputs, is_artifact, load, to_text

if TYPE_CHECKING:
    from rekindle.storage import Entry, Store


class UnknownKey(RekindleError):
    """The cache key of a step cannot be computed; the message is the reason."""


class NotReusable(UnknownKey):
    """With these inputs, the step must not reuse a result; the message is the reason."""


# schemes of generated data, and of data in installed packages; such a URI always has the same data,
# because the cache key covers the code
CONSTANT_SCHEMES = frozenset({"simulate", "sklearn", "python"})
Facts = dict[str, Any]
OpenBucket = Callable[[str], "Store"]


def _open_bucket(name: str) -> "Store":
    from rekindle.storage import Store

    return Store(name, os.environ.get(S3_ENDPOINT_URL) or None)


def collect_facts(
    module: str,
    inputs: StepInputs,
    artifacts: Mapping[str, str],
    identity: str = "",
    runs_here: bool = True,
    open_bucket: OpenBucket | None = None,
) -> Facts:
    """Return everything that the outputs of a step depend on: inputs, code, and the content of the
    data that it reads.

    `artifacts`: digests of the input artifacts; `identity`: identity of the code (default: computed
    from the code of this process); `runs_here`: True if the step runs on this machine, so that this
    process can read the local paths in its inputs. Raises UnknownKey if some of the data cannot be
    read.
    """
    reason = load(module).REUSE.not_reused_if(inputs)
    if reason:
        raise NotReusable(reason)

    data_read = data_digests(module, inputs, runs_here, open_bucket)

    return facts_without_data(module, inputs, identity) | {
        "artifacts": dict(artifacts),
        "data_read": data_read,
    }


def data_digests(
    module: str, inputs: StepInputs, runs_here: bool = True, open_bucket: OpenBucket | None = None
) -> dict[str, str]:
    """Return a digest of the content of each path and s3:// URI that a step reads. Raises
    UnknownKey."""
    uris = load(module).REUSE.data_read(inputs)
    return {uri: data_digest(uri, runs_here, open_bucket or _open_bucket) for uri in uris}


def facts_without_data(module: str, inputs: StepInputs, identity: str = "") -> Facts:
    """Collect the facts that do not depend on the data: step, code and inputs."""
    ignored_inputs = load(module).REUSE.ignored_inputs
    fields = type(inputs).model_fields
    keyed_fields = [
        name for name in fields if name not in ignored_inputs and not is_artifact(fields[name])
    ]
    values = {name: to_text(getattr(inputs, name)) for name in keyed_fields}
    workload = {"workload": str(getattr(inputs, "workload"))} if "workload" in fields else {}  # noqa: B009
    identity = identity or code.code_identity(modules_of({"step": module, "inputs": workload}))
    return {"step": module, "code": identity, "inputs": values}


def modules_of(facts: Facts) -> list[str]:
    """Return the modules whose code affects the outputs of a step: the step itself and its
    workload."""
    return [facts["step"], *filter(None, [facts["inputs"].get("workload")])]


def reason_not_covered(facts: Facts) -> str:
    """Return the reason if the code in `facts` does not include all files loaded since the call of
    `loaded.record_loaded_files`; "" if it includes them all."""
    # if the code in `facts` is an image digest, it covers all files, because the image contains all
    # code of the pod
    if facts["code"].startswith(code.IMAGE_DIGEST):
        return ""
    return loaded.reason_uncovered(modules_of(facts))


def compute_key(facts: Facts) -> str:
    """Return the sha256 of `facts`."""
    return hashlib.sha256(to_json(facts, sort_keys=True).encode()).hexdigest()


def data_digest(uri: str, runs_here: bool = True, open_bucket: OpenBucket = _open_bucket) -> str:
    """Return a digest of the data at a path or s3:// URI; for a generator of data (simulate://) and
    for data of an installed package, return the URI itself. Raises UnknownKey, also for any other
    scheme, because changes of its data cannot be detected."""
    address = parse_s3_address(uri)
    if address:
        objects = find_objects(open_bucket(address.bucket), address.key)

        entries = [
            [entry.key.removeprefix(address.key), entry.size, entry.etag] for entry in objects
        ]
        if not entries:
            raise UnknownKey(f"{uri} does not exist")
        return hashlib.sha256(to_json(entries).encode()).hexdigest()

    scheme = split_address(uri).scheme
    if "://" in uri and scheme in CONSTANT_SCHEMES:
        return uri
    if "://" in uri and scheme != "file":
        raise UnknownKey(f"it cannot be verified that {format_address(uri)} is unchanged")

    path = Path(uri.removeprefix("file://"))
    if not runs_here:
        raise UnknownKey(f"{path} is a path in the pod and cannot be read from this machine")
    if not path.exists():
        raise UnknownKey(f"{path} does not exist")

    return describe_files(path)["sha256"]


def find_objects(store: "Store", key: str) -> "list[Entry]":
    """Return the object `key`; if it does not exist, the objects in the folder `key`; if none
    exists, all objects whose key starts with `key`.

    In the first two cases, an object whose key only starts with `key`, such as a backup, does not
    belong to the data.
    """
    entries = list(store.list(key))
    folder = f"{key.rstrip('/')}/"
    exact = [entry for entry in entries if entry.key == key != folder]
    return exact or [entry for entry in entries if entry.key.startswith(folder)] or entries


def data_digest_or_empty(uri: str) -> str:
    """Return the digest of the data at `uri`; "" if this process cannot read or verify the data."""
    try:
        return data_digest(uri)
    except (UnknownKey, OSError):
        return ""


def digest_of_unchanged(uri: str, digest_before: str) -> tuple[str, list[str]]:
    """Return a digest and warnings: `digest_before` and no warnings if the data is unchanged since
    this digest was computed, otherwise "" and one warning."""
    if data_digest_or_empty(uri) == digest_before:
        return digest_before, []
    return "", [
        f"{uri} changed while it was read: the data of this run may be a mixture of old and new"
        " rows."
    ]


def describe_files(path: Path) -> dict[str, Any]:
    """Return the sha256 of the names and contents of all files below `path`, the number of files,
    and their total bytes.

    Raises OSError if a file cannot be read, and ConfigError if there are too many links.
    """
    if path.exists() and not path.is_dir() and not path.is_file():
        # reject a device, which may be endless, and a FIFO, which would block
        raise OSError(errno.EINVAL, "it is neither a regular file nor a folder", str(path))

    if path.is_dir():
        files = sorted(linked_files_below(path))
    else:
        files = [path]

    file_digests = []
    for file in files:
        with file.open("rb") as stream:
            file_digests.append(
                (str(file.relative_to(path)), hashlib.file_digest(stream, "sha256").hexdigest())
            )

    size = sum(file.stat().st_size for file in files)

    return {
        "sha256": hashlib.sha256(to_json(file_digests).encode()).hexdigest(),
        "files": len(files),
        "bytes": size,
    }
