"""A manifest is read exactly as it was written, or reported as damaged."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.checkpoint import manifest
from rekindle.training.checkpoint.manifest import DamagedCheckpoint, Manifest

NAMES = st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=4)


def make_manifest(step: int = 5, **more: Any) -> Manifest:
    first: Any = {
        "identity": "i",
        "layout": "l",
        "step": step,
        "bytes": 10,
        "chunk": 8,
        "chunks": ["ab" * 32] * 2,
        "loader": "",
        "facts": {"trained_seconds": 1.5, "losses": 0},
        "fingerprint": {"torch": "2"},
    }
    return first | more


@given(
    step=st.integers(0, 2**53 - 1),
    chunks=NAMES,
    remaining_bytes=st.integers(0, 7),
    loader=st.binary(max_size=20),
)
def test_a_written_manifest_is_read_unchanged(
    step: int, chunks: list[str], remaining_bytes: int, loader: bytes
) -> None:
    text = base64.b64encode(loader).decode()
    written = make_manifest(
        step, bytes=8 * len(chunks) - remaining_bytes, chunks=chunks, loader=text
    )
    name, data = manifest.encode_manifest(written)
    assert (
        manifest.parse_manifest(name, data)
        == manifest.parse_manifest(f"prefix/manifests/{name}", data)
        == written
    )
    assert manifest.parse_step(name) == manifest.parse_step(f"prefix/manifests/{name}") == step


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"bytes": 8},
            {"bytes": 17},
            {"bytes": -1},
            {"step": -1},
            {"step": 2**53},
            {"chunk": 0},
            {"chunks": ["ab"] * 2},
        ),
        *(
            {"facts": {"trained_seconds": -0.1, "losses": 0}},
            {"facts": {"trained_seconds": 1, "losses": -1}},
        ),
    ],
)
def test_a_manifest_with_impossible_values_counts_as_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpoint):
        manifest.parse_manifest(*manifest.encode_manifest(make_manifest() | change))  # type: ignore[operator]


def test_a_manifest_with_one_changed_byte_is_rejected() -> None:
    name, data = manifest.encode_manifest(make_manifest())
    for offset in range(0, len(data), 7):
        with pytest.raises(
            DamagedCheckpoint, match="its manifest does not match the hash in its name"
        ):
            manifest.parse_manifest(
                name, data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
            )


@pytest.mark.parametrize(
    "name",
    ["latest", "5-abcdefabcdef.json", "0000000005-abc.json", "x0000000005-abcdefabcdef.json"],
)
def test_the_step_of_an_invalid_name_is_minus_one(name: str) -> None:
    assert manifest.parse_step(name) == manifest.parse_step(f"p/{name}") == -1
