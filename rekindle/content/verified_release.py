"""Read single files of a release from the object store, and compare them with the hash in the key
of the release.

    read_verified_files(store, "releases/fraud/HASH", ["model.json", "model.safetensors"])
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
from rekindle.names import ArtifactKey, Digest, format_untrusted

if TYPE_CHECKING:
    from rekindle.storage import Store

RELEASE_RECORD = "release.json"
VERDICT = "verdict.json"
# file with the histograms of the test rows
REFERENCE = "reference.json"
MLMODEL = "MLmodel"
INPUT_EXAMPLE = "input_example.json"
SERVING_EXAMPLE = "serving_input_example.json"
MLFLOW_FILES = {MLMODEL, INPUT_EXAMPLE, SERVING_EXAMPLE}
# files that the hash in the release's key does not cover; release.json contains their sha256
DESCRIBED_FILES = (REFERENCE, ORIGIN, CURVE)
# MLflow adds the last of these files when it downloads a release
UNHASHED_FILES = {RELEASE_RECORD, VERDICT, *DESCRIBED_FILES, "registered_model_meta"}
# Earlier versions of Rekindle used only the first 12 digits of the hash in the key of a release. A
# hash of 12 digits detects damage, but an attacker who can write to the bucket could create other
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


def require_release_key(key: str, release_address: str) -> None:
    """Raise DataError unless `key`, for example from a tag in MLflow, is the key of a release.

    Without the hash at the end of the key, a change of both release.json and a file would not be
    detected.
    """
    if not is_release(key.rstrip("/")):
        raise DataError(
            f"{format_untrusted(release_address)} is not a release: its key must be"
            " releases/NAME/HASH, with"
            f" the 64 digits of the hash. Correct the tag of the version in MLflow. Or: {REMEDY}"
        )


def compute_content_hash(sha256_by_name: Mapping[str, str]) -> str:
    """Return the hash of the names and contents of a release's files, which is the last part of its
    key."""
    hash_lines = (f"{file_sha256}  {key}\n" for key, file_sha256 in sorted(sha256_by_name.items()))
    return hashlib.sha256("".join(hash_lines).encode()).hexdigest()


def reject_wrong_hash(key: str, sha256_by_name: Mapping[str, str], release_address: str) -> None:
    """Raise DataError if the hash at the end of a release's key is not the hash of its files.

    `key` is "" for a release that MLflow has downloaded, because its key is unknown.
    """
    actual_hash = compute_content_hash(sha256_by_name)
    recorded_hash = key.rpartition("/")[2]
    if key and recorded_hash not in (actual_hash, actual_hash[:EARLIER_HASH_LENGTH]):
        raise DataError(
            f"{release_address.rstrip('/')}/{RELEASE_RECORD} was changed since the release: the"
            f" hash of its files is {actual_hash}. {REMEDY}"
        )


def read_verified_files(
    store: "Store", key: str, file_names: Iterable[str], max_bytes: int | None = MAX_BYTES
) -> dict[str, bytes]:
    """Return the verified content of the requested files of a release. Raises NotFound if a file is
    missing, DataError if a file was changed, and InvalidDocument if a file has more than
    `max_bytes` bytes (None: no limit)."""
    require_release_key(key, store.uri(key))
    release_record = read_object(FileHashes, store, f"{key}/{RELEASE_RECORD}")
    reject_wrong_hash(key, release_record.files, store.uri(key))
    # the hash in the key covers only `files`, so its hashes count if both fields name a file
    sha256_by_name = {**release_record.described, **release_record.files}

    content_by_name: dict[str, bytes] = {}

    for file_name in file_names:
        if file_name not in sha256_by_name:
            raise NotFound(f"{store.uri(key)}/{file_name} is not a file of the release.")

        content_by_name[file_name] = store.get(f"{key}/{file_name}", max_bytes)
        actual_sha256 = hashlib.sha256(content_by_name[file_name]).hexdigest()
        if actual_sha256 != sha256_by_name[file_name]:
            raise DataError(
                f"{store.uri(key)}/{file_name} changed since the release (sha256 {actual_sha256},"
                f" and {sha256_by_name[file_name]} in {RELEASE_RECORD}). {REMEDY}"
            )

    return content_by_name


def read_described_file(store: "Store", key: str, file_name: str) -> bytes:
    """Return the content of a file in DESCRIBED_FILES. Raises NotFound if the file is missing, and
    DataError if it was changed.

    The described file is not verified if the release was written by an earlier version of Rekindle,
    which did not record the sha256 of this file.
    """
    release_record = read_object(FileHashes, store, f"{key}/{RELEASE_RECORD}")
    if file_name in release_record.described:
        return read_verified_files(store, key, [file_name])[file_name]
    return store.get(f"{key}/{file_name}")


def verify_described_files(
    folder: Path,
    described_hashes: Mapping[str, str],
    file_names: Iterable[str],
    release_address: str,
) -> None:
    """Raise DataError if a file in DESCRIBED_FILES of a downloaded release was changed, added or
    removed.

    `described_hashes`: {file: sha256} of release.json; it is empty if an earlier version of
    Rekindle has written the release.
    """
    for file_name in file_names:
        file = folder / file_name
        actual_sha256 = file_sha256(file) if file.exists() else None
        if described_hashes and actual_sha256 != described_hashes.get(file_name):
            raise DataError(
                f"{release_address.rstrip('/')}/{file_name} changed since the release. {REMEDY}"
            )


def verify_release_files(
    folder: Path, recorded_hashes: Mapping[str, str], release_address: str
) -> None:
    """Raise DataError if a file of a release is missing, was added, or was changed.

    `recorded_hashes`: {file: sha256} of at least all files that the hash in the key covers.
    """
    paths_by_name = list_paths(folder)

    missing_names = sorted(name for name in recorded_hashes if name not in paths_by_name)
    if missing_names:
        raise DataError(
            f"{release_address} is not a complete release ({', '.join(missing_names)} is missing)."
            f" {REMEDY}"
        )

    # if an earlier version of Rekindle made the release, its hash does not cover the files that
    # MLflow needs
    unhashed_names = set() if MLMODEL in recorded_hashes else MLFLOW_FILES
    known_names = recorded_hashes.keys() | UNHASHED_FILES | unhashed_names
    added_names = sorted(paths_by_name.keys() - known_names)
    if added_names:
        raise DataError(
            f"{release_address}: {', '.join(added_names)} was added since the release. Delete it."
            f" Or: {REMEDY}"
        )

    actual_hashes = zip(
        recorded_hashes,
        compute_sha256s(paths_by_name[name] for name in recorded_hashes),
        strict=True,
    )
    damaged_files = {
        name: sha256 for name, sha256 in actual_hashes if sha256 != recorded_hashes[name]
    }
    if damaged_files:
        digest_texts = ", ".join(
            f"sha256 {sha256}, and {recorded_hashes[name]} in {RELEASE_RECORD}"
            for name, sha256 in damaged_files.items()
        )
        raise DataError(
            f"{release_address}: {', '.join(damaged_files)} changed since the release"
            f" ({digest_texts}). {REMEDY}"
        )
