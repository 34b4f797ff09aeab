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
from rekindle.step import StepInputs, format_parameter, is_artifact, load_step_module

if TYPE_CHECKING:
    from rekindle.storage import Store, StoredObject


class UnknownKey(RekindleError):
    """The cache key of a step cannot be computed; the message is the reason."""


class NotReusable(UnknownKey):
    """The step must not reuse a result for its current inputs; the message is the reason."""


# schemes of generated data, and of data in installed packages; such a URI always has the same data,
# because the cache key covers the code
CONSTANT_SCHEMES = frozenset({"simulate", "sklearn", "python"})
Facts = dict[str, Any]
OpenBucket = Callable[[str], "Store"]


def _open_bucket(bucket_name: str) -> "Store":
    from rekindle.storage import Store

    return Store(bucket_name, os.environ.get(S3_ENDPOINT_URL) or None)


def collect_facts(
    step_module: str,
    step_inputs: StepInputs,
    artifact_digests: Mapping[str, str],
    code_identity: str = "",
    is_this_machine: bool = True,
    open_bucket: OpenBucket | None = None,
) -> Facts:
    """Return everything that the outputs of a step depend on: inputs, code, and the content of the
    data that it reads.

    `artifact_digests`: digests of the input artifacts; `code_identity`: identity of the code
    (default: computed from the code of this process); `is_this_machine` is True if the step runs on
    this machine, so that this process can read the local paths in the step's inputs. Raises
    UnknownKey if some of the data cannot be read.
    """
    not_reused_reason = load_step_module(step_module).REUSE.not_reused_if(step_inputs)
    if not_reused_reason:
        raise NotReusable(not_reused_reason)

    data_read_digests = data_digests(step_module, step_inputs, is_this_machine, open_bucket)

    return facts_without_data(step_module, step_inputs, code_identity) | {
        "artifacts": dict(artifact_digests),
        "data_read": data_read_digests,
    }


def data_digests(
    step_module: str,
    step_inputs: StepInputs,
    is_this_machine: bool = True,
    open_bucket: OpenBucket | None = None,
) -> dict[str, str]:
    """Return a digest of the content of each path and s3:// URI that a step reads. Raises
    UnknownKey if some of the data cannot be read."""
    data_uris = load_step_module(step_module).REUSE.data_read(step_inputs)
    return {
        data_uri: data_digest(data_uri, is_this_machine, open_bucket or _open_bucket)
        for data_uri in data_uris
    }


def facts_without_data(
    step_module: str, step_inputs: StepInputs, given_identity: str = ""
) -> Facts:
    """Collect the facts that do not depend on the data: step, code and inputs."""
    ignored_inputs = load_step_module(step_module).REUSE.ignored_inputs
    input_fields = type(step_inputs).model_fields
    keyed_fields = [
        name
        for name in input_fields
        if name not in ignored_inputs and not is_artifact(input_fields[name])
    ]
    input_texts = {name: format_parameter(getattr(step_inputs, name)) for name in keyed_fields}
    workload_input: dict[str, str] = {}
    if "workload" in input_fields:
        workload_input["workload"] = str(getattr(step_inputs, "workload"))  # noqa: B009
    given_identity = given_identity or code.code_identity(
        list_modules({"step": step_module, "inputs": workload_input})
    )
    return {"step": step_module, "code": given_identity, "inputs": input_texts}


def list_modules(step_facts: Facts) -> list[str]:
    """Return the modules whose code affects the outputs of a step: the step itself and its
    workload."""
    return [step_facts["step"], *filter(None, [step_facts["inputs"].get("workload")])]


def reason_not_covered(step_module: str, workload_name: str = "") -> str:
    """Return the reason why the cache key of a step does not cover all code files that this process
    has loaded; "" if the key covers all loaded code files.

    `loaded.record_loaded_files` must have been called at the start of the process.
    """
    # the image contains all code of the pod
    if code.read_pod_image_digest():
        return ""
    return loaded.reason_uncovered(filter(None, [step_module, workload_name]))


def compute_cache_key(step_facts: Facts) -> str:
    """Return the sha256 of `step_facts`."""
    return hashlib.sha256(to_json(step_facts, sort_keys=True).encode()).hexdigest()


def data_digest(
    data_uri: str, is_this_machine: bool = True, open_bucket: OpenBucket = _open_bucket
) -> str:
    """Return a digest of the data at a path or s3:// URI. For generated data (simulate://) and for
    data in an installed package, return the URI itself. Raises UnknownKey if the data cannot be
    read, or if changes of the data cannot be detected because its URI has another scheme."""
    s3_address = parse_s3_address(data_uri)
    if s3_address:
        data_objects = find_objects(open_bucket(s3_address.bucket), s3_address.key)

        object_rows = [
            [data_object.key.removeprefix(s3_address.key), data_object.size, data_object.etag]
            for data_object in data_objects
        ]
        if not object_rows:
            raise UnknownKey(f"{data_uri} does not exist")
        return hashlib.sha256(to_json(object_rows).encode()).hexdigest()

    uri_scheme = split_address(data_uri).scheme
    if "://" in data_uri and uri_scheme in CONSTANT_SCHEMES:
        return data_uri
    if "://" in data_uri and uri_scheme != "file":
        raise UnknownKey(f"it cannot be verified that {format_address(data_uri)} is unchanged")

    path = Path(data_uri.removeprefix("file://"))
    if not is_this_machine:
        raise UnknownKey(f"{path} is a path in the pod and cannot be read from this machine")
    if not path.exists():
        raise UnknownKey(f"{path} does not exist")

    return describe_files(path)["sha256"]


def find_objects(store: "Store", key: str) -> "list[StoredObject]":
    """Return the object `key`; if it does not exist, the objects in the folder `key`; if none
    exists, all objects whose key starts with `key`.

    If the object `key` or the folder `key` exists, an object whose key only starts with `key`, such
    as a backup, does not belong to the data.
    """
    listed_objects = list(store.list(key))
    folder_prefix = f"{key.rstrip('/')}/"
    exact_matches = [
        listed_object
        for listed_object in listed_objects
        if listed_object.key == key != folder_prefix
    ]
    return (
        exact_matches
        or [
            listed_object
            for listed_object in listed_objects
            if listed_object.key.startswith(folder_prefix)
        ]
        or listed_objects
    )


def data_digest_or_empty(data_uri: str) -> str:
    """Return the digest of the data at `data_uri`; "" if this process cannot read or verify the
    data."""
    try:
        return data_digest(data_uri)
    except (UnknownKey, OSError):
        return ""


def digest_if_unchanged(data_uri: str, digest_before: str) -> tuple[str, list[str]]:
    """Return a digest and warnings. If the data is unchanged since `digest_before` was computed,
    return `digest_before` and no warnings, otherwise "" and one warning."""
    if data_digest_or_empty(data_uri) == digest_before:
        return digest_before, []
    return "", [
        f"{data_uri} changed while it was read: the data of this run may be a mixture of old and"
        " new rows."
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
        sorted_files = sorted(linked_files_below(path))
    else:
        sorted_files = [path]

    file_digests = []
    for file in sorted_files:
        with file.open("rb") as binary_file:
            file_digests.append(
                (
                    str(file.relative_to(path)),
                    hashlib.file_digest(binary_file, "sha256").hexdigest(),
                )
            )

    total_bytes = sum(file.stat().st_size for file in sorted_files)

    return {
        "sha256": hashlib.sha256(to_json(file_digests).encode()).hexdigest(),
        "files": len(sorted_files),
        "bytes": total_bytes,
    }
