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
# maximum number of files that an error message names
MAX_NAMES = 3
REMEDY = (
    "Prepare the dataset again: `rekindle run CONFIG --no-cache` does not reuse the damaged one."
)


class RecordedFile(BaseModel):
    """Size and sha256 of a file of a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


FileList = TypeAdapter(dict[str, RecordedFile])


def record_files(folder: Path) -> str:
    """Write the list of the files in `folder`, and return the digest of the dataset.

    Empty folders are removed, because an object store cannot store them. Raises DataError if
    `folder` contains anything other than files and folders.
    """
    _remove_empty_folders(folder)
    files_by_name = list_dataset_files(folder)
    _reject_special_files(files_by_name, str(folder))
    content_hashes = hashes.compute_sha256s(files_by_name.values())

    file_entries = {
        name: {"size": path.stat().st_size, "sha256": sha256}
        for (name, path), sha256 in zip(files_by_name.items(), content_hashes, strict=True)
    }
    hashes_text = to_json(file_entries, indent=0, sort_keys=True) + "\n"
    (folder / FILE_LIST).write_text(hashes_text)
    return hashlib.sha256(hashes_text.encode()).hexdigest()


def _remove_empty_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        # `rmdir` fails for a folder that is not empty, so only empty folders are removed
        with suppress(OSError):
            if Path(path) != folder:
                os.rmdir(path)


def list_dataset_files(folder: Path) -> dict[str, Path]:
    """Return the files of a dataset, except `dataset.files.json`, by their path relative to
    `folder`.

    Also return paths that a dataset may not contain, such as empty folders (hashes.list_paths).
    """
    paths_by_name = hashes.list_paths(folder)
    paths_by_name.pop(FILE_LIST, None)
    return paths_by_name


def read_digest(folder: Path, dataset_address: str = "") -> str:
    """Return the digest of a dataset, without verifying its files. Raises DataError if the list of
    the dataset's files is missing."""
    return hashlib.sha256(_read_file_list(folder, dataset_address or str(folder))).hexdigest()


def verify_dataset(folder: Path, expected_digest: str = "", dataset_address: str = "") -> None:
    """Raise DataError if a file in `folder` was changed, added or removed since the list was
    written, or if an empty folder was added.

    `expected_digest`: expected digest (empty: any); `dataset_address`: address of the dataset for
    messages.
    """
    dataset_address = dataset_address or str(folder)
    list_bytes = _read_file_list(folder, dataset_address)

    actual_digest = hashlib.sha256(list_bytes).hexdigest()
    if expected_digest and actual_digest != expected_digest:
        raise DataError(
            f"{dataset_address}/{FILE_LIST} has the sha256 {actual_digest}, but the digest of the"
            f" dataset is {expected_digest}: it is another dataset, or its list of files was"
            f" changed. Pass the digest that `prepare` returned. Or: {REMEDY}"
        )

    files_by_name = list_dataset_files(folder)
    _reject_special_files(files_by_name, dataset_address)
    files_stamp = hashes.compute_stamp([folder / FILE_LIST, *files_by_name.values()])
    if hashes.is_verified(files_stamp):
        return

    recorded_files = _parse_file_list(list_bytes, dataset_address)
    _reject_missing_or_added_files(files_by_name, recorded_files, dataset_address)
    _reject_changed_files(files_by_name, recorded_files, dataset_address)
    hashes.mark_verified(files_stamp)


def _read_file_list(folder: Path, dataset_address: str) -> bytes:
    try:
        return (folder / FILE_LIST).read_bytes()
    except OSError as error:
        raise DataError(
            f"{dataset_address} is not a complete dataset: {FILE_LIST} with the hashes of its"
            f" files is missing ({error.strerror}). Earlier versions of Rekindle did not write it."
            f" {REMEDY}"
        ) from error


def _parse_file_list(list_bytes: bytes, dataset_address: str) -> dict[str, RecordedFile]:
    try:
        return FileList.validate_json(list_bytes)
    except ValidationError as error:
        error_detail = error.errors()[0]
        raise DataError(
            f"{dataset_address}/{FILE_LIST} is not a list of files ({error_detail['msg']})."
            f" {REMEDY}"
        ) from error


def _reject_special_files(files_by_name: dict[str, Path], dataset_address: str) -> None:
    special_names = [name for name, path in files_by_name.items() if not path.is_file()]
    if special_names:
        raise DataError(
            f"{dataset_address}: {_format_file_names(special_names)} is not a file: a dataset has"
            f" only files, links to files, and folders with files. Remove it. Or: {REMEDY}"
        )


def _reject_missing_or_added_files(
    files_by_name: dict[str, Path], recorded_files: dict[str, RecordedFile], dataset_address: str
) -> None:
    missing_names = sorted(recorded_files.keys() - files_by_name.keys())
    if missing_names:
        raise DataError(
            f"{dataset_address}: {_format_file_names(missing_names)} of {FILE_LIST} is missing."
            f" {REMEDY}"
        )

    added_names = sorted(files_by_name.keys() - recorded_files.keys())
    if added_names:
        raise DataError(
            f"{dataset_address}: {_format_file_names(added_names)} is not in {FILE_LIST}: it was"
            f" added after the dataset was prepared. Remove it. Or: {REMEDY}"
        )


def _reject_changed_files(
    files_by_name: dict[str, Path], recorded_files: dict[str, RecordedFile], dataset_address: str
) -> None:
    for file_name, path in files_by_name.items():
        size_bytes = path.stat().st_size
        recorded_size = recorded_files[file_name].size
        if size_bytes != recorded_size:
            raise DataError(
                f"{dataset_address}/{file_name} has {size_bytes:,} bytes, and {recorded_size:,} in"
                f" {FILE_LIST} (sha256 {recorded_files[file_name].sha256}): it was changed after"
                f" the dataset was prepared. {REMEDY}"
            )

    content_hashes = hashes.compute_sha256s(files_by_name.values())
    for file_name, sha256 in zip(files_by_name, content_hashes, strict=True):
        if sha256 != recorded_files[file_name].sha256:
            raise DataError(
                f"{dataset_address}/{file_name} has the sha256 {sha256}, and"
                f" {recorded_files[file_name].sha256} in {FILE_LIST}: it was changed after the"
                f" dataset was prepared. {REMEDY}"
            )


def _format_file_names(file_names: list[str]) -> str:
    if len(file_names) > MAX_NAMES:
        more_names_text = f" and {len(file_names) - MAX_NAMES} more"
    else:
        more_names_text = ""
    return ", ".join(file_names[:MAX_NAMES]) + more_names_text
