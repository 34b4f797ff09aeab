"""A `+` in an S3 path is a `+` of the key, and neither a space nor an escape."""

from pathlib import Path

import pytest

from rekindle.cache.key import data_digest
from rekindle.errors import RekindleError
from rekindle.storage import Store
from tests.rekindle.local.services.endpoint import KEY, SECRET, Endpoint


def test_a_plus_of_a_path_is_a_plus_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Endpoint(tmp_path / "s3")
    monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
    monkeypatch.setenv("S3_BUCKET", "data")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = Store.from_env()

    for key, content in (("in/a+b", b"plus"), ("in/a b", b"space"), ("in/a%2Bb", b"escape")):
        store.put(key, content)

    listed_objects = {entry.key: store.get(entry.key) for entry in store.list("in/")}
    assert listed_objects == {"in/a+b": b"plus", "in/a b": b"space", "in/a%2Bb": b"escape"}

    uris = [store.uri(key) for key in listed_objects]
    assert len({data_digest(uri, open_bucket=lambda _: store) for uri in uris}) == 3
    with pytest.raises(RekindleError, match="does not exist"):
        data_digest("s3://data/in/a++b", open_bucket=lambda _: store)

    server.kill()
