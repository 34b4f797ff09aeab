"""Valid answers of an MLflow server by the path of the request, and a server that answers with
them."""

import json
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from rekindle import tracking
from tests.http_server import Answer, HttpServer, Request

RUN_ID = "0123456789abcdef0123456789abcdef"
MODEL_VERSION = {
    "name": "demo",
    "version": "1",
    "source": "s3://bucket/releases/demo/0123456789ab",
    "run_id": RUN_ID,
    "creation_timestamp": 1_700_000_000_000,
    "tags": [
        {"key": tracking.URI, "value": "releases/demo/0123456789ab"},
        {"key": tracking.SHA256, "value": "0" * 64},
        {"key": tracking.DEPLOYMENT, "value": "demo-1"},
        {"key": tracking.KEEP_RELEASES, "value": "3"},
    ],
}
RUN = {
    "info": {
        "run_id": RUN_ID,
        "experiment_id": "7",
        "status": "FINISHED",
        "start_time": 1_700_000_000_000,
        "end_time": 1_700_000_060_000,
        "artifact_uri": f"mlflow-artifacts:/7/{RUN_ID}/artifacts",
        "lifecycle_stage": "active",
    },
    "data": {
        "metrics": [{"key": "rows", "value": 5.0, "timestamp": 1, "step": 0}],
        "params": [{"key": "data.source", "value": "s3://bucket/demo-4k2xp/prepare/out"}],
        "tags": [{"key": tracking.WORKFLOW, "value": "demo-4k2xp"}],
    },
}
EXPERIMENT = {
    "experiment_id": "7",
    "name": "demo",
    "lifecycle_stage": "active",
    "tags": [{"key": tracking.VIEW_TAG, "value": "{}"}],
}
MODEL = {"name": "demo", "aliases": [{"alias": "champion", "version": "1"}]}
DOCUMENTS: dict[str, Any] = {
    "mlflow/experiments/get-by-name": {"experiment": EXPERIMENT},
    "mlflow/experiments/search": {"experiments": [EXPERIMENT]},
    "mlflow/runs/get": {"run": RUN},
    "mlflow/runs/create": {"run": RUN},
    "mlflow/runs/search": {"runs": [RUN]},
    "mlflow/artifacts/list": {"files": [{"path": "evaluation/report.html", "is_dir": False}]},
    "mlflow/registered-models/get": {"registered_model": MODEL},
    "mlflow/registered-models/search": {"registered_models": [MODEL]},
    "mlflow/model-versions/get": {"model_version": MODEL_VERSION},
    "mlflow/model-versions/create": {"model_version": MODEL_VERSION},
    "mlflow/model-versions/search": {"model_versions": [MODEL_VERSION]},
    "mlflow/model-versions/get-download-uri": {"artifact_uri": "s3://bucket/models/1"},
}


class MlflowServer(HttpServer):
    """Answers each request with the document of its path in DOCUMENTS; `answer_with` replaces the
    document of one path."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.path = ""
        self.content = b""
        self.status = 200

    def __enter__(self) -> Self:
        super().__enter__()
        self.environment = pytest.MonkeyPatch()
        self.environment.setenv("MLFLOW_TRACKING_URI", self.url)
        self.environment.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        return self

    def __exit__(self, *_: Any) -> None:
        self.environment.undo()
        super().__exit__()

    def answer_with(self, path: str, content: bytes, status: int = 200) -> None:
        """Delete the record of the earlier requests, and from now on answer requests for `path`
        with `content`."""
        self.requests.clear()
        self.path = path
        self.content = content
        self.status = status

    def _answer(self, request: Request) -> Answer:
        path = urlsplit(request.path).path.removeprefix("/api/2.0/")
        if path == self.path:
            return Answer(self.status, self.content)
        return Answer(body=json.dumps(DOCUMENTS.get(path, {})))
