"""Finds the result of a program after its end, and stores it as the model of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rekindle.content.result_files import RESULT, describe_files, list_result, result_sha256
from rekindle.documents import MODEL_FILE, describe_model
from rekindle.errors import CodeError, DataError
from rekindle.program.config import fill
from rekindle.program.spec import ProgramSpec
from rekindle.training.membership.completion import open_store


class Checkpoints(Protocol):
    """The checkpoints of a node."""

    def newest_complete(self) -> Path | None:
        """Return the path of the newest complete checkpoint."""
        ...


def find_result(spec: ProgramSpec, values: Mapping[str, object], checkpoints: Checkpoints) -> Path:
    """Return the path of the result. Raises CodeError if it does not exist."""
    setting = spec.program.result
    if setting:
        path = Path(fill(setting, values))
        if path.exists():
            return path
        raise CodeError(
            f"the program ended with exit code 0, but its result {path} does not exist. Correct"
            " program.result, or let the program write it."
        )

    newest = checkpoints.newest_complete()
    if newest:
        return newest
    raise CodeError(
        "the program ended with exit code 0, but it has written no complete checkpoint. Let it save"
        " into {checkpoints}, or name the file or folder of its model in program.result."
    )


def publish_result(spec: ProgramSpec, path: Path, step: int) -> str:
    """Store the files of the result, and then model.json; return the sha256 of the result. Raises
    CodeError or StorageError."""
    try:
        files = list_result(path)
    except DataError as error:
        raise CodeError(*error.lines) from error

    store = open_store()
    contents = describe_files(files)
    sha256 = result_sha256(contents)
    for name, file in files.items():
        store.upload(file, f"{spec.out}/{RESULT}/{name}")

    fields = {
        "sha256": sha256,
        "files": {name: content.model_dump() for name, content in contents.items()},
        "is_file": path.is_file(),
        "workload": spec.workload,
        "identity": spec.identity_hash(),
        "digest": spec.digest,
        "step": max(0, step),
        "model": spec.model,
        # leave out the environment variables, because a release publishes this file
        "program": spec.program.model_dump(mode="json", exclude={"environment"}),
    }
    # last, because it marks the model as complete
    store.put(f"{spec.out}/{MODEL_FILE}", describe_model(fields))
    return sha256
