"""Reads the description of a trained model, `model.json`, and verifies the model's weights,
`model.safetensors`, or its result files."""

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


def parse_description(json_content: bytes | str, model_address: str) -> ModelFile:
    """Parse the content of model.json. Raises DataError."""
    try:
        return parse(ModelFile, json_content, model_address, REMEDY)
    except InvalidDocument as error:
        raise DataError(str(error)) from error


def read_description(model_folder: Path) -> ModelFile:
    """Read model.json in the folder of a trained model. Raises DataError."""
    try:
        return read_file(ModelFile, model_folder / MODEL_FILE, REMEDY)
    except InvalidDocument as error:
        raise DataError(f"{model_folder} is not a trained model ({error})") from error


def list_model_files(model_description: ModelFile) -> list[str]:
    """Return the paths of a model's files in its folder: model.json, and its weights or the files
    of its result."""
    if model_description.files:
        return [MODEL_FILE, *(f"{RESULT}/{name}" for name in model_description.files)]
    return [MODEL_FILE, WEIGHTS_FILE]


def verify_weights(model_folder: Path, model_address: str = "") -> ModelFile:
    """Return the description of the model in `model_folder`. Raises DataError unless the weights,
    or the files of a training program's result, have the sha256 in the description.

    `model_address`: address of the model for messages.
    """
    model_description = read_description(model_folder)
    if model_description.files:
        verify_result(model_folder, model_description, model_address or str(model_folder))
        return model_description

    file = model_folder / WEIGHTS_FILE
    if not file.is_file():
        raise DataError(
            f"{model_address or model_folder} is not a trained model: {WEIGHTS_FILE} is missing."
            f" {REMEDY}"
        )

    files_stamp = hashes.compute_stamp([file, model_folder / MODEL_FILE])
    if not hashes.is_verified(files_stamp):
        reject_wrong_weights(
            model_description.sha256,
            _compute_tensors_sha256(file),
            lambda: hashes.file_sha256(file),
            f"{model_address or model_folder}/{WEIGHTS_FILE}",
        )
        hashes.mark_verified(files_stamp)

    return model_description


def reject_wrong_weights(
    expected_sha256: str, tensors_sha256: str, hash_file: Callable[[], str], model_address: str
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
            f"the weights in {model_address} have the sha256 {tensors_sha256 or file_sha256}, but"
            f" {MODEL_FILE} has {expected_sha256}: one of the two files was changed after the"
            f" training. {REMEDY}"
        )


def _compute_tensors_sha256(file: Path) -> str:
    """Return the `weights_sha256` of a safetensors file; "" if the file is in the format of another
    framework."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened_tensors:
            tensor_names = sorted(opened_tensors.keys())
            return _hash_tensors((name, opened_tensors.get_tensor(name)) for name in tensor_names)
    except SafetensorError:
        return ""


def weights_sha256(tensors_by_name: "Mapping[str, Tensor]") -> str:
    """Return the sha256 over name, dtype, shape and little-endian bytes of each tensor, sorted by
    name."""
    return _hash_tensors((name, tensors_by_name[name]) for name in sorted(tensors_by_name))


def _hash_tensors(named_tensors: "Iterable[tuple[str, Tensor]]") -> str:
    sha256_hash = hashlib.sha256()
    for tensor_name, tensor in named_tensors:
        cpu_tensor = tensor.detach().cpu()
        sha256_hash.update(f"{tensor_name} {cpu_tensor.dtype} {list(cpu_tensor.shape)}\n".encode())
        sha256_hash.update(view_tensor_bytes(cpu_tensor))
    return sha256_hash.hexdigest()


def view_tensor_bytes(tensor: "Tensor") -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    import torch

    flat_bytes: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat_bytes)
