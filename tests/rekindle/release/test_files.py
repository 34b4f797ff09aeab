"""Only complete releases can be downloaded for serving."""

from pathlib import Path

import pytest

from rekindle.errors import DataError, StorageError
from rekindle.release.files import download
from rekindle.storage import Store
from tests.rekindle.serving.running import release


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model.safetensors": b"other"}, DataError, r"model\.safetensors changed since the release"),
        ({"state/words.txt": None}, DataError, r"words\.txt"),
        ({"release.json": None}, DataError, "is not a complete release"),
        ({"release.json": b"{"}, DataError, "is not a complete release"),
        (
            dict.fromkeys(("release.json", "model.safetensors", "model.json", "state/words.txt", "dataset.json")),
            StorageError,
            "not exist",
        ),
    ],
)
def test_an_incomplete_release_is_rejected(
    s3: Store, tmp_path: Path, change: dict[str, bytes | None], error: type[Exception], message: str
) -> None:
    prefix = "releases/echo/broken/"
    release(s3, prefix)
    for key, data in change.items():
        s3.delete([prefix + key]) if data is None else s3.put(prefix + key, data)
    with pytest.raises(error, match=message):
        download(s3, prefix, tmp_path)
