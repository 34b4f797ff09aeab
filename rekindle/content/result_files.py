"""The result of a training program, which is a file or a folder; model.json lists its files.

<model>/model.json              {"files": {path: {size, sha256}}, "sha256": hash of the list, ...}
<model>/result/<path>           the files
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from argolocal.common.json_text import to_json
from argolocal.common.wording import first_names
from rekindle.content import hashes
from rekindle.documents import MODEL_FILE, ModelFile, ResultFile
from rekindle.errors import DataError
from rekindle.names import ArtifactKey, show

RESULT = "result"  # folder below the model's folder that contains the files of the result
MAX_NAMES = 3  # maximum number of files that an error message names
REMEDY = (
    "Train the model again: `rekindle run CONFIG --no-cache` does not reuse the damaged one. If it"
    " is a release, release it again."
)


def list_result(path: Path) -> dict[str, Path]:
    """Return the files of a result by their relative path. Raises DataError if the result is empty,
    or contains a file whose path cannot be a key, or anything other than files and folders."""
    if path.is_file():
        files = {path.name: path}
    else:
        files = {
            name: file
            for name, file in hashes.list_paths(path).items()
            if file.is_symlink() or not file.is_dir()
        }

    special = [name for name, file in files.items() if not file.is_file()]
    if special:
        raise DataError(
            f"{path}/{special[0]} is not a file: a result has only files, links to files, and"
            " folders. Write the result to another folder."
        )

    for name in files:
        if not ArtifactKey.matches(name):
            raise DataError(
                f"{show(name)} in {path} cannot be stored: {ArtifactKey.RULE}. Rename the file."
            )

    if not files:
        raise DataError(
            f"{path} is empty: the result must have at least one file. Correct program.result."
        )
    return files


def describe_files(files: Mapping[str, Path]) -> dict[str, ResultFile]:
    """Return size and sha256 of each file. Raises OSError."""
    contents = hashes.compute_sha256s(files.values())
    return {
        name: ResultFile(size=path.stat().st_size, sha256=sha256)
        for (name, path), sha256 in zip(files.items(), contents, strict=True)
    }


def result_sha256(files: Mapping[str, ResultFile]) -> str:
    """Return the sha256 of a result: of the JSON of its files, sorted by path."""
    fields = {name: file.model_dump() for name, file in files.items()}
    return hashlib.sha256(to_json(fields, sort_keys=True).encode()).hexdigest()


def result_path(model: Path, description: ModelFile) -> Path:
    """Return the path of the result in the folder of a model: of its only file, or of the folder
    with its files."""
    if description.is_file:
        [name] = description.files
        return model / RESULT / name
    return model / RESULT


def verify_result(model: Path, description: ModelFile, address: str) -> None:
    """Raise DataError if a file of the result was changed, added or removed since the training.

    `address`: address of the model for messages.
    """
    recorded_files = description.files
    sha256 = result_sha256(recorded_files)
    if sha256 != description.sha256:
        raise DataError(
            f"the files in {address}/{MODEL_FILE} have the sha256 {sha256}, and"
            f" {description.sha256} is recorded there: the list was changed after the training."
            f" {REMEDY}"
        )

    paths = hashes.list_paths(model / RESULT)
    missing_names = sorted(recorded_files.keys() - paths.keys())
    if missing_names:
        raise DataError(
            f"{address}/{RESULT}: {first_names(missing_names, MAX_NAMES)} is missing. {REMEDY}"
        )

    added_names = sorted(paths.keys() - recorded_files.keys())
    if added_names:
        raise DataError(
            f"{address}/{RESULT}: {first_names(added_names, MAX_NAMES)} is not in {MODEL_FILE}: it"
            f" was added after the training. Remove it. Or: {REMEDY}"
        )

    stamp = hashes.compute_stamp([model / MODEL_FILE, *paths.values()])
    if not hashes.is_verified(stamp):
        _reject_other_contents(paths, recorded_files, address)
        hashes.mark_verified(stamp)


def _reject_other_contents(
    paths: Mapping[str, Path], recorded_files: Mapping[str, ResultFile], address: str
) -> None:
    special = [name for name, path in paths.items() if not path.is_file()]
    if special:
        raise DataError(f"{address}/{RESULT}/{special[0]} is not a file. {REMEDY}")

    for name, file in describe_files(paths).items():
        if file != recorded_files[name]:
            raise DataError(
                f"{address}/{RESULT}/{name} has {file.size:,} bytes and the sha256 {file.sha256},"
                f" but {MODEL_FILE} has {recorded_files[name].size:,} bytes and"
                f" {recorded_files[name].sha256}: the file was changed after the training."
                f" {REMEDY}"
            )
