"""The result of a training program, which is a file or a folder; model.json lists its files.

<model>/model.json              {"files": {path: {size, sha256}}, "sha256": hash of the list, ...}
<model>/result/<path>           the files
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from argolocal.common.json_text import to_json
from argolocal.common.wording import join_first_names
from rekindle.content import hashes
from rekindle.documents import MODEL_FILE, ModelFile, ResultFile
from rekindle.errors import DataError
from rekindle.names import ArtifactKey, format_untrusted

# folder below the model's folder that contains the files of the result
RESULT = "result"
# maximum number of files that an error message names
MAX_NAMES = 3
REMEDY = (
    "Train the model again: `rekindle run CONFIG --no-cache` does not reuse the damaged one. If it"
    " is a release, release it again."
)


def list_result_files(path: Path) -> dict[str, Path]:
    """Return the files of a result by their relative path. Raises DataError if the result is empty,
    or contains a file whose path cannot be a key, or anything other than files and folders."""
    if path.is_file():
        files_by_name = {path.name: path}
    else:
        files_by_name = {
            name: file
            for name, file in hashes.list_paths(path).items()
            if file.is_symlink() or not file.is_dir()
        }

    special_names = [name for name, file in files_by_name.items() if not file.is_file()]
    if special_names:
        raise DataError(
            f"{path}/{special_names[0]} is not a file: a result has only files, links to files, and"
            " folders. Write the result to another folder."
        )

    for name in files_by_name:
        if not ArtifactKey.matches(name):
            raise DataError(
                f"{format_untrusted(name)} in {path} cannot be stored: {ArtifactKey.RULE}. Rename"
                " the file."
            )

    if not files_by_name:
        raise DataError(
            f"{path} is empty: the result must have at least one file. Correct program.result."
        )
    return files_by_name


def describe_files(files_by_name: Mapping[str, Path]) -> dict[str, ResultFile]:
    """Return size and sha256 of each file of a result. Raises OSError."""
    content_hashes = hashes.compute_sha256s(files_by_name.values())
    return {
        name: ResultFile(size=path.stat().st_size, sha256=sha256)
        for (name, path), sha256 in zip(files_by_name.items(), content_hashes, strict=True)
    }


def compute_result_sha256(recorded_files: Mapping[str, ResultFile]) -> str:
    """Return the sha256 of a result: the hash of the JSON object with the size and sha256 of each
    file, sorted by path."""
    file_records = {name: file.model_dump() for name, file in recorded_files.items()}
    return hashlib.sha256(to_json(file_records, sort_keys=True).encode()).hexdigest()


def find_result_path(model_folder: Path, model_description: ModelFile) -> Path:
    """Return the path of the result in the folder of a model: the only file of the result if
    `is_file` is set, else the folder with its files."""
    if model_description.is_file:
        [name] = model_description.files
        return model_folder / RESULT / name
    return model_folder / RESULT


def verify_result(model_folder: Path, model_description: ModelFile, model_address: str) -> None:
    """Raise DataError if a file of the result was changed, added or removed since the training.

    `model_address`: address of the model for messages.
    """
    recorded_files = model_description.files
    sha256 = compute_result_sha256(recorded_files)
    if sha256 != model_description.sha256:
        raise DataError(
            f"the files in {model_address}/{MODEL_FILE} have the sha256 {sha256}, and"
            f" {model_description.sha256} is recorded there: the list was changed after the"
            f" training. {REMEDY}"
        )

    paths_by_name = hashes.list_paths(model_folder / RESULT)
    missing_names = sorted(recorded_files.keys() - paths_by_name.keys())
    if missing_names:
        raise DataError(
            f"{model_address}/{RESULT}: {join_first_names(missing_names, MAX_NAMES)} is missing."
            f" {REMEDY}"
        )

    added_names = sorted(paths_by_name.keys() - recorded_files.keys())
    if added_names:
        raise DataError(
            f"{model_address}/{RESULT}: {join_first_names(added_names, MAX_NAMES)} is not in"
            f" {MODEL_FILE}: it was added after the training. Remove it. Or: {REMEDY}"
        )

    files_stamp = hashes.compute_stamp([model_folder / MODEL_FILE, *paths_by_name.values()])
    if not hashes.is_verified(files_stamp):
        _reject_changed_files(paths_by_name, recorded_files, model_address)
        hashes.mark_verified(files_stamp)


def _reject_changed_files(
    paths_by_name: Mapping[str, Path], recorded_files: Mapping[str, ResultFile], model_address: str
) -> None:
    special_names = [name for name, path in paths_by_name.items() if not path.is_file()]
    if special_names:
        raise DataError(f"{model_address}/{RESULT}/{special_names[0]} is not a file. {REMEDY}")

    for name, file in describe_files(paths_by_name).items():
        if file != recorded_files[name]:
            raise DataError(
                f"{model_address}/{RESULT}/{name} has {file.size:,} bytes and the sha256"
                f" {file.sha256}, but {MODEL_FILE} has {recorded_files[name].size:,} bytes and"
                f" {recorded_files[name].sha256}: the file was changed after the training."
                f" {REMEDY}"
            )
