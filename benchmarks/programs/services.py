"""An object store for the benchmarks of this folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.local.services.services import Services


@contextmanager
def start_object_store() -> Iterator[dict[str, str]]:
    """Start an object store, and yield the environment variables with which clients find it."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        services = Services(Path(temporary_folder), {})
        services.start("s3")
        try:
            yield services.credentials() | {
                "S3_ENDPOINT_URL": services.url("s3"),
                "S3_BUCKET": "rekindle",
            }
        finally:
            services.down()
