"""Documents and addresses of others do not stop retention."""

import pytest

from rekindle.release.retention.decision import Release
from rekindle.release.retention.listing import list_addresses, make_inputs_function
from rekindle.storage import Store


@pytest.mark.parametrize("content", [b"[" * 100_000, b"5", b'{"start": "a", "start": "b"}'])
def test_a_release_with_a_malformed_document_reads_no_other(s3: Store, content: bytes) -> None:
    release = Release("demo", 1, "releases/demo/0123456789ab/", "demo")
    s3.put(f"{release.prefix}model.json", content)
    assert list(make_inputs_function(s3, [release])(release)) == ["/"]


def test_the_source_of_a_version_may_be_any_text() -> None:
    assert list_addresses({"name": "demo", "version": "1", "source": "s3://[x"}) == {"s3://[x"}
