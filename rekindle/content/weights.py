"""The description of a trained model, `model.json`, and the verification of its weights,
`model.safetensors`, or of its result files."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.content import hashes
from rekindle.content.result_files import REMEDY as REMEDY
from rekindle.content.result_files import RESULT, verify_result
from rekindle.documents import MODEL_FILE, InvalidDocument, ModelFile, parse, read_file
from rekindle.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"


def parse_description(data: bytes | str, address: str) -> ModelFile:
    """Parse the content of model.json. Raises DataError."""
    try:
        return parse(ModelFile, data, address, REMEDY)
    except InvalidDocument as error:
        raise DataError(str(error)) from error


def read_description(folder: Path) -> ModelFile:
    """Read model.json in the folder of a trained model. Raises DataError."""
    try:
        return read_file(ModelFile, folder / MODEL_FILE, REMEDY)
    except InvalidDocument as error:
        raise DataError(f"{folder} is not a trained model ({error})") from error


def list_model_files(description: ModelFile) -> list[str]:
    """Return the paths of a model's files in its folder: model.json, and its weights or the files
    of its result."""
    if description.files:
        return [MODEL_FILE, *(f"{RESULT}/{name}" for name in description.files)]
    return [MODEL_FILE, WEIGHTS_FILE]


def verify_weights(folder: Path, address: str = "") -> ModelFile:
    """Return the description of the model in `folder`. Raises DataError unless the weights, or the
    files of a training program's result, have the sha256 in the description.

    `address`: address of the model for messages.
    """
    description = read_description(folder)
    if description.files:
        verify_result(folder, description, address or str(folder))
        return description

    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise DataError(
            f"{address or folder} is not a trained model: {WEIGHTS_FILE} is missing. {REMEDY}"
        )

    stamp = hashes.compute_stamp([file, folder / MODEL_FILE])
    if not hashes.is_verified(stamp):
        reject_other_weights(
            description.sha256,
            _tensors_sha256(file),
            lambda: hashes.file_sha256(file),
            f"{address or folder}/{WEIGHTS_FILE}",
        )
        hashes.mark_verified(stamp)

    return description


def reject_other_weights(
    expected_sha256: str, tensors_sha256: str, hash_file: Callable[[], str], address: str
) -> None:
    """Raise DataError unless the weights have the sha256 `expected_sha256`.

    The expected sha256 may be `tensors_sha256` (the result of `weights_sha256`) or the result of
    `hash_file`: a step with another framework may record the sha256 of the file.
    """
    if tensors_sha256 == expected_sha256:
        return

    file_sha256 = hash_file()
    if file_sha256 != expected_sha256:
        raise DataError(
            f"the weights in {address} have the sha256 {tensors_sha256 or file_sha256}, but"
            f" {MODEL_FILE} has {expected_sha256}: one of the two files was changed after the"
            f" training. {REMEDY}"
        )


def _tensors_sha256(file: Path) -> str:
    """Return the `weights_sha256` of a safetensors file; "" if the file is in the format of another
    framework."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            names = sorted(tensors.keys())
            return _sha256((name, tensors.get_tensor(name)) for name in names)
    except SafetensorError:
        return ""


def weights_sha256(tensors: "Mapping[str, Tensor]") -> str:
    """Return the sha256 over name, dtype, shape and little-endian bytes of each tensor, sorted by
    name."""
    return _sha256((name, tensors[name]) for name in sorted(tensors))


def _sha256(tensors: "Iterable[tuple[str, Tensor]]") -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        value = tensor.detach().cpu()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    import torch

    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
