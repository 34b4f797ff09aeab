"""Register a version of a model twice, as a process does that dies after it has repeated a
request."""

import pytest

from rekindle import tracking
from rekindle.errors import TrackingError
from tests.proxy import Proxy, Write


def leave_duplicate(mlflow_url: str, name: str, uri: str, source: str) -> None:
    """Register the same files as two versions; the process that registers the second version cannot
    delete it again."""
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_url, mlflow_url)

    with Proxy(mlflow_url) as proxy, pytest.MonkeyPatch.context() as patch:

        def register_first(write: Write) -> None:
            if write.path.endswith("model-versions/create"):
                tags = {tracking.URI: uri, tracking.SHA256: "0" * 64}
                client.create_model_version(name, source, tags=tags)
            elif write.path.endswith("model-versions/delete"):
                proxy.away = True

        proxy.before = register_first
        patch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(TrackingError, match="does not answer"):
            tracking.register_version(name, uri, source, "0" * 64, "", {})
