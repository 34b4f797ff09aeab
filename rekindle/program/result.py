"""Finds the result of a program after its end, and stores it as the model of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rekindle.content.result_files import (
    RESULT,
    compute_result_sha256,
    describe_files,
    list_result_files,
)
from rekindle.documents import MODEL_FILE, encode_model_description
from rekindle.errors import CodeError, DataError
from rekindle.program.config import fill_placeholders
from rekindle.program.spec import ProgramSpec
from rekindle.training.membership.completion import open_store


class NodeCheckpoints(Protocol):
    """The checkpoints of a node."""

    def newest_complete(self) -> Path | None:
        """Return the path of the newest complete checkpoint."""
        ...


def find_result(
    program_spec: ProgramSpec,
    values_by_placeholder: Mapping[str, object],
    checkpoints: NodeCheckpoints,
) -> Path:
    """Return the path of the program's result. Raises CodeError if the result does not exist."""
    result_setting = program_spec.program.result
    if result_setting:
        result_path = Path(fill_placeholders(result_setting, values_by_placeholder))
        if result_path.exists():
            return result_path
        raise CodeError(
            f"the program ended with exit code 0, but its result {result_path} does not exist."
            " Correct program.result, or let the program write it."
        )

    newest_checkpoint = checkpoints.newest_complete()
    if newest_checkpoint:
        return newest_checkpoint
    raise CodeError(
        "the program ended with exit code 0, but it has written no complete checkpoint. Let it save"
        " into {checkpoints}, or name the file or folder of its model in program.result."
    )


def publish_result(program_spec: ProgramSpec, result_path: Path, step: int) -> str:
    """Store the files of the result, and then model.json; return the sha256 of the result. Raises
    CodeError or StorageError."""
    try:
        files_by_name = list_result_files(result_path)
    except DataError as error:
        raise CodeError(*error.lines) from error

    store = open_store()
    contents_by_name = describe_files(files_by_name)
    sha256 = compute_result_sha256(contents_by_name)
    for file_name, file_path in files_by_name.items():
        store.upload(file_path, f"{program_spec.out}/{RESULT}/{file_name}")

    model_fields = {
        "sha256": sha256,
        "files": {
            file_name: file_content.model_dump()
            for file_name, file_content in contents_by_name.items()
        },
        "is_file": result_path.is_file(),
        "workload": program_spec.workload,
        "identity": program_spec.identity_hash(),
        "digest": program_spec.digest,
        "step": max(0, step),
        "model": program_spec.model,
        # leave out the environment variables, because a release publishes model.json
        "program": program_spec.program.model_dump(mode="json", exclude={"environment"}),
    }
    # write model.json last, because it marks the model as complete
    store.put(f"{program_spec.out}/{MODEL_FILE}", encode_model_description(model_fields))
    return sha256
