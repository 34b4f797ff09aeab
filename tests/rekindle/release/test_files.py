"""Only whole releases serve."""

from pathlib import Path

import pytest

from rekindle.errors import DataError, StorageError
from rekindle.release.files import download
from rekindle.storage import Store
from tests.rekindle.serving.running import release


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model.safetensors": b"other"}, DataError, r"model\.safetensors changed since the release"),
        ({"state/words.txt": None}, DataError, r"words\.txt"),
        ({"release.json": None}, DataError, "is not a whole release"),
        ({"release.json": b"{"}, DataError, "is not a whole release"),
        (
            dict.fromkeys(("release.json", "model.safetensors", "model.json", "state/words.txt", "dataset.json")),
            StorageError,
            "not exist",
        ),
    ],
)
def test_a_release_that_is_not_whole_is_never_served(
    s3: Store, tmp_path: Path, change: dict[str, bytes | None], error: type[Exception], says: str
) -> None:
    prefix = "releases/echo/broken/"
    release(s3, prefix)
    for key, data in change.items():
        s3.delete([prefix + key]) if data is None else s3.put(prefix + key, data)
    with pytest.raises(error, match=says):
        download(s3, prefix, tmp_path)
