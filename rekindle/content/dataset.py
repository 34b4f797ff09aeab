"""The list of a dataset's files, `dataset.files.json`: {path: {size, sha256}}.

    digest = record_files(folder)            # after the last file was written
    verify_dataset(folder, digest)           # before the first file is read

The sha256 of the list is the digest of the dataset, so the digest changes if a file is changed,
renamed, added or removed.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from argolocal.common.json_text import to_json
from rekindle.content import hashes
from rekindle.errors import DataError

FILE_LIST = "dataset.files.json"
MAX_NAMES = 3  # maximum number of files that an error message names
REMEDY = (
    "Prepare the dataset again: `rekindle run CONFIG --no-cache` does not reuse the damaged one."
)


class File(BaseModel):
    """The recorded content of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


FileList = TypeAdapter(dict[str, File])


def record_files(folder: Path) -> str:
    """Write the list of the files in `folder`, and return the digest of the dataset.

    Empty folders are removed, because an object store cannot store them. Raises DataError if
    `folder` contains anything other than files and folders.
    """
    _remove_empty_folders(folder)
    files = list_dataset_files(folder)
    _reject_special_files(files, str(folder))
    contents = hashes.compute_sha256s(files.values())

    entries = {
        name: {"size": path.stat().st_size, "sha256": sha256}
        for (name, path), sha256 in zip(files.items(), contents, strict=True)
    }
    text = to_json(entries, indent=0, sort_keys=True) + "\n"
    (folder / FILE_LIST).write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def _remove_empty_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        # `rmdir` fails for a folder with content, so such a folder is kept
        with suppress(OSError):
            if Path(path) != folder:
                os.rmdir(path)


def list_dataset_files(folder: Path) -> dict[str, Path]:
    """Return the files of a dataset, except the list, by their path relative to `folder`.

    Also return paths that a dataset may not contain, such as empty folders (hashes.list_paths).
    """
    files = hashes.list_paths(folder)
    files.pop(FILE_LIST, None)
    return files


def read_digest(folder: Path, address: str = "") -> str:
    """Return the digest of a dataset, without verifying its files. Raises DataError if the list of
    the dataset's files is missing."""
    return hashlib.sha256(_read_list(folder, address or str(folder))).hexdigest()


def verify_dataset(folder: Path, digest: str = "", address: str = "") -> None:
    """Raise DataError if a file in `folder` was changed, added or removed since the list was
    written, or if an empty folder was added.

    `digest`: expected digest (empty: any); `address`: address of the dataset for messages.
    """
    address = address or str(folder)
    data = _read_list(folder, address)

    actual_digest = hashlib.sha256(data).hexdigest()
    if digest and actual_digest != digest:
        raise DataError(
            f"{address}/{FILE_LIST} has the sha256 {actual_digest}, but the digest of the dataset"
            f" is {digest}: it is another dataset, or its list of files was changed. Pass the"
            f" digest that `prepare` returned. Or: {REMEDY}"
        )

    files = list_dataset_files(folder)
    _reject_special_files(files, address)
    stamp = hashes.compute_stamp([folder / FILE_LIST, *files.values()])
    if hashes.is_verified(stamp):
        return

    recorded_files = _parse_list(data, address)
    _reject_other_names(files, recorded_files, address)
    _reject_other_contents(files, recorded_files, address)
    hashes.mark_verified(stamp)


def _read_list(folder: Path, address: str) -> bytes:
    try:
        return (folder / FILE_LIST).read_bytes()
    except OSError as error:
        raise DataError(
            f"{address} is not a complete dataset: {FILE_LIST} with the hashes of its files is"
            f" missing ({error.strerror}). Earlier versions of Rekindle did not write it. {REMEDY}"
        ) from error


def _parse_list(data: bytes, address: str) -> dict[str, File]:
    try:
        return FileList.validate_json(data)
    except ValidationError as error:
        detail = error.errors()[0]
        raise DataError(
            f"{address}/{FILE_LIST} is not a list of files ({detail['msg']}). {REMEDY}"
        ) from error


def _reject_special_files(files: dict[str, Path], address: str) -> None:
    names = [name for name, path in files.items() if not path.is_file()]
    if names:
        raise DataError(
            f"{address}: {_list_file_names(names)} is not a file: a dataset has only files, links"
            f" to files, and folders with files. Remove it. Or: {REMEDY}"
        )


def _reject_other_names(
    files: dict[str, Path], recorded_files: dict[str, File], address: str
) -> None:
    missing_names = sorted(recorded_files.keys() - files.keys())
    if missing_names:
        raise DataError(
            f"{address}: {_list_file_names(missing_names)} of {FILE_LIST} is missing. {REMEDY}"
        )

    added_names = sorted(files.keys() - recorded_files.keys())
    if added_names:
        raise DataError(
            f"{address}: {_list_file_names(added_names)} is not in {FILE_LIST}: it was added after"
            f" the dataset was prepared. Remove it. Or: {REMEDY}"
        )


def _reject_other_contents(
    files: dict[str, Path], recorded_files: dict[str, File], address: str
) -> None:
    for name, path in files.items():
        size = path.stat().st_size
        recorded_size = recorded_files[name].size
        if size != recorded_size:
            raise DataError(
                f"{address}/{name} has {size:,} bytes, and {recorded_size:,} in {FILE_LIST} (sha256"
                f" {recorded_files[name].sha256}): it was changed after the dataset was prepared."
                f" {REMEDY}"
            )

    contents = hashes.compute_sha256s(files.values())
    for name, sha256 in zip(files, contents, strict=True):
        if sha256 != recorded_files[name].sha256:
            raise DataError(
                f"{address}/{name} has the sha256 {sha256}, and {recorded_files[name].sha256} in"
                f" {FILE_LIST}: it was changed after the dataset was prepared. {REMEDY}"
            )


def _list_file_names(file_names: list[str]) -> str:
    if len(file_names) > MAX_NAMES:
        more = f" and {len(file_names) - MAX_NAMES} more"
    else:
        more = ""
    return ", ".join(file_names[:MAX_NAMES]) + more
