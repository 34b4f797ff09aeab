"""Files of a release that are read one at a time from the object store, compared with the hash in
the release's key.

contents = read_verified(store, "releases/fraud/0123456789ab", ["model.json", "model.safetensors"])
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

from rekindle.documents import Document, name_field, read_object
from rekindle.errors import DataError, NotFound
from rekindle.names import ArtifactKey, Digest, show

if TYPE_CHECKING:
    from rekindle.storage import Store

RECORD = "release.json"
RELEASE_KEY = re.compile("releases/[^/]+/[0-9a-f]{12}")
HASH_LENGTH = 12
REMEDY = "Release the model again."
Sha256 = Annotated[str, name_field(Digest)]


class FileHashes(Document):
    """release.json, as far as it has the sha256 of each file that is loaded."""

    files: dict[Annotated[str, name_field(ArtifactKey)], Sha256]


def is_release(key: str) -> bool:
    """True if a key is releases/NAME/HASH."""
    return ArtifactKey.matches(key) and RELEASE_KEY.fullmatch(key) is not None


def reject_other_folder(key: str, address: str) -> None:
    """Raise DataError unless a key, such as a tag of MLflow, is that of a release.

    Without the hash at its end, a change of release.json and the files would not be noticed.
    """
    if not is_release(key.rstrip("/")):
        raise DataError(
            f"{show(address)} is not a release: its key must be releases/NAME/HASH, with the 12"
            f" digits of the hash. Correct the tag of the version in MLflow. Or: {REMEDY}"
        )


def content_hash(hashes: Mapping[str, str]) -> str:
    """Return the last part of the key of a release with these files: the hash of their names and
    contents."""
    lines = (f"{content}  {key}\n" for key, content in sorted(hashes.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:HASH_LENGTH]


def reject_other_hash(key: str, hashes: Mapping[str, str], address: str) -> None:
    """Raise DataError if the key of a release ends with another hash than that of its files.

    `key`: "" for a release that MLflow has downloaded.
    """
    actual = content_hash(hashes)
    if key and not key.endswith(f"/{actual}"):
        raise DataError(
            f"{address.rstrip('/')}/{RECORD} was changed since the release: the hash of its files"
            f" is {actual}. {REMEDY}"
        )


def read_verified(store: "Store", key: str, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of some files of a release. Raises NotFound, or DataError if one of them
    was changed."""
    reject_other_folder(key, store.uri(key))
    hashes = read_object(FileHashes, store, f"{key}/{RECORD}").files
    reject_other_hash(key, hashes, store.uri(key))

    contents: dict[str, bytes] = {}

    for name in names:
        if name not in hashes:
            raise NotFound(f"{store.uri(key)}/{name} is not a file of the release.")

        contents[name] = store.get(f"{key}/{name}")
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != hashes[name]:
            raise DataError(
                f"{store.uri(key)}/{name} changed since the release (sha256 {actual}, and"
                f" {hashes[name]} in {RECORD}). {REMEDY}"
            )

    return contents
