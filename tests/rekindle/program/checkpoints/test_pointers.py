"""A pointer file, such as `latest`, is restored with the name of the restored checkpoint, and other
pointers are left as they are."""

from pathlib import Path

import pytest

from rekindle.program.checkpoints.folder import CheckpointPointer, CheckpointUnit
from rekindle.program.checkpoints.pointers import describe_pointers

NESTED_PATH = "version_1/checkpoints/epoch=1.ckpt"


@pytest.mark.parametrize(
    "unit, path, text, pattern",
    [
        ("checkpoint-5", "latest", "checkpoint-5\n", "{name}\n"),
        ("checkpoint-5", "latest", "checkpoint-4\n", "{name}\n"),
        (NESTED_PATH, "latest.txt", f"{NESTED_PATH}\n", "version_1/checkpoints/{name}\n"),
        (NESTED_PATH, "version_1/checkpoints/latest", "epoch=0.ckpt\n", "{name}\n"),
        ("checkpoint-5", "latest_iteration", "5\n", "{step}\n"),
    ],
)
def test_a_pointer_follows_the_checkpoints_of_its_family(
    unit: str, path: str, text: str, pattern: str
) -> None:
    (record,) = describe_pointers(
        Path("/x"), [CheckpointPointer(path, text, False)], CheckpointUnit(unit, {}, 1)
    )
    assert record.text == pattern


@pytest.mark.parametrize(
    "text",
    ["version_0/checkpoints/epoch=1.ckpt\n", "/x/version_1/checkpoints/epoch=1.ckpt\n", "other\n"],
)
def test_a_pointer_to_another_folder_is_not_made_empty(text: str) -> None:
    pointers = [CheckpointPointer("latest.txt", text, False)]
    assert describe_pointers(Path("/x"), pointers, CheckpointUnit(NESTED_PATH, {}, 1)) == []
