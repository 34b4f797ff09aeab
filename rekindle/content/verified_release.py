"""Read single files of a release from the object store, and compare them with the hash in the key
of the release.

    read_verified(store, "releases/fraud/HASH", ["model.json", "model.safetensors"])
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from argolocal.common.json_text import MAX_BYTES
from rekindle.content.hashes import compute_sha256s, file_sha256, list_paths
from rekindle.documents import Sealed, name_field, read_object
from rekindle.errors import DataError, NotFound
from rekindle.keys import CURVE, ORIGIN
from rekindle.names import ArtifactKey, Digest, show

if TYPE_CHECKING:
    from rekindle.storage import Store

RELEASE_RECORD = "release.json"
VERDICT = "verdict.json"
REFERENCE = "reference.json"  # file with the histograms of the test rows
MLMODEL = "MLmodel"
INPUT_EXAMPLE = "input_example.json"
SERVING_EXAMPLE = "serving_input_example.json"
MLFLOW_FILES = {MLMODEL, INPUT_EXAMPLE, SERVING_EXAMPLE}
# files that the hash in the release's key does not cover; release.json contains their sha256
DESCRIBED_FILES = (REFERENCE, ORIGIN, CURVE)
# MLflow adds the last of these files when it downloads a release
UNHASHED_FILES = {RELEASE_RECORD, VERDICT, *DESCRIBED_FILES, "registered_model_meta"}
# Earlier versions of Rekindle used only the first 12 digits of the hash in the key of a release.
# Such a short hash detects damage, but an attacker who can write to the bucket could create other
# files with the same 12 digits.
RELEASE_KEY = re.compile("releases/[^/]+/(?:[0-9a-f]{64}|[0-9a-f]{12})")
EARLIER_HASH_LENGTH = 12
REMEDY = "Release the model again."
Sha256 = Annotated[str, name_field(Digest)]


class FileHashes(Sealed):
    """The part of release.json with the sha256 of each file.

    `files`: files that the hash in the release's key covers; `described`: files in DESCRIBED_FILES,
    which this hash does not cover.
    """

    files: dict[Annotated[str, name_field(ArtifactKey)], Sha256]
    described: dict[Annotated[str, name_field(ArtifactKey)], Sha256] = Field(default_factory=dict)


def is_release(key: str) -> bool:
    """Return True if a key has the form releases/NAME/HASH."""
    return ArtifactKey.matches(key) and RELEASE_KEY.fullmatch(key) is not None


def reject_other_folder(key: str, address: str) -> None:
    """Raise DataError unless `key`, for example from a tag in MLflow, is the key of a release.

    Without the hash at the end of the key, a change of both release.json and a file would not be
    detected.
    """
    if not is_release(key.rstrip("/")):
        raise DataError(
            f"{show(address)} is not a release: its key must be releases/NAME/HASH, with the 64"
            f" digits of the hash. Correct the tag of the version in MLflow. Or: {REMEDY}"
        )


def content_hash(hashes: Mapping[str, str]) -> str:
    """Return the hash of the names and contents of a release's files, which is the last part of its
    key."""
    lines = (f"{content}  {key}\n" for key, content in sorted(hashes.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def reject_other_hash(key: str, hashes: Mapping[str, str], address: str) -> None:
    """Raise DataError if the hash at the end of a release's key is not the hash of its files.

    `key` is "" for a release that MLflow has downloaded, because its key is unknown.
    """
    actual = content_hash(hashes)
    recorded = key.rpartition("/")[2]
    if key and recorded not in (actual, actual[:EARLIER_HASH_LENGTH]):
        raise DataError(
            f"{address.rstrip('/')}/{RELEASE_RECORD} was changed since the release: the hash of its"
            f" files is {actual}. {REMEDY}"
        )


def read_verified(
    store: "Store", key: str, names: Iterable[str], max_bytes: int | None = MAX_BYTES
) -> dict[str, bytes]:
    """Return the content of some files of a release. Raises NotFound if a file is missing,
    DataError if a file was changed, and InvalidDocument if a file has more than `max_bytes` bytes
    (None: no limit)."""
    reject_other_folder(key, store.uri(key))
    record = read_object(FileHashes, store, f"{key}/{RELEASE_RECORD}")
    reject_other_hash(key, record.files, store.uri(key))
    hashes = {**record.files, **record.described}

    contents: dict[str, bytes] = {}

    for name in names:
        if name not in hashes:
            raise NotFound(f"{store.uri(key)}/{name} is not a file of the release.")

        contents[name] = store.get(f"{key}/{name}", max_bytes)
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != hashes[name]:
            raise DataError(
                f"{store.uri(key)}/{name} changed since the release (sha256 {actual}, and"
                f" {hashes[name]} in {RELEASE_RECORD}). {REMEDY}"
            )

    return contents


def read_described(store: "Store", key: str, name: str) -> bytes:
    """Return the content of a file in DESCRIBED_FILES. Raises NotFound if the file is missing, and
    DataError if it was changed.

    The file is not verified if an earlier version of Rekindle, which did not record its sha256, has
    written the release.
    """
    record = read_object(FileHashes, store, f"{key}/{RELEASE_RECORD}")
    if name in record.described:
        return read_verified(store, key, [name])[name]
    return store.get(f"{key}/{name}")


def reject_changed(
    folder: Path, described: Mapping[str, str], names: Iterable[str], address: str
) -> None:
    """Raise DataError if a file in DESCRIBED_FILES of a downloaded release was changed, added or
    removed.

    `described`: {file: sha256} of release.json; it is empty if an earlier version of Rekindle has
    written the release.
    """
    for name in names:
        file = folder / name
        actual = file_sha256(file) if file.exists() else None
        if described and actual != described.get(name):
            raise DataError(f"{address.rstrip('/')}/{name} changed since the release. {REMEDY}")


def reject_other_files(folder: Path, recorded: Mapping[str, str], address: str) -> None:
    """Raise DataError if a file of a release is missing, was added, or was changed.

    `recorded`: {file: sha256} of at least all files that the hash in the key covers.
    """
    files = list_paths(folder)

    missing_names = sorted(name for name in recorded if name not in files)
    if missing_names:
        raise DataError(
            f"{address} is not a complete release ({', '.join(missing_names)} is missing). {REMEDY}"
        )

    # the hash in a release of an earlier version of Rekindle does not cover the files of MLflow
    unhashed_names = set() if MLMODEL in recorded else MLFLOW_FILES
    known_names = recorded.keys() | UNHASHED_FILES | unhashed_names
    added_names = sorted(files.keys() - known_names)
    if added_names:
        raise DataError(
            f"{address}: {', '.join(added_names)} was added since the release. Delete it. Or:"
            f" {REMEDY}"
        )

    contents = zip(recorded, compute_sha256s(files[name] for name in recorded), strict=True)
    damaged = {name: sha256 for name, sha256 in contents if sha256 != recorded[name]}
    if damaged:
        digests = ", ".join(
            f"sha256 {sha256}, and {recorded[name]} in {RELEASE_RECORD}"
            for name, sha256 in damaged.items()
        )
        raise DataError(
            f"{address}: {', '.join(damaged)} changed since the release ({digests}). {REMEDY}"
        )
