"""MLflow's server as one process, for one machine.

    python -m rekindle.local.services.mlflow --fd 3 --store sqlite:///mlflow.db --artifacts s3://b/mlflow --record FILE

`mlflow server` imports everything twice (a parent that migrates the database, a uvicorn child) and needs 10 CPU seconds
and 500 MB for it. This serves the same Flask application (what `mlflow server --gunicorn-opts` runs) from threads of
the process that migrated the database: 3 seconds and half the memory. Artifacts are proxied, so that clients need
nothing but MLFLOW_TRACKING_URI; the server itself reaches them with MLFLOW_S3_ENDPOINT_URL and AWS_*.
"""

import argparse
import os
import socket
from pathlib import Path
from typing import Any

from rekindle.local.processes import end_unless_recorded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.local.services.mlflow")
    parser.add_argument("--fd", type=int, required=True, help="a listening socket to serve on")
    parser.add_argument("--store", required=True, help="the database's URI")
    parser.add_argument("--artifacts", required=True, help="where artifacts are kept: an s3:// URI")
    parser.add_argument("--record", type=Path, required=True, help="it ends when this is gone or has another pid")
    args = parser.parse_args()
    end_unless_recorded(args.record)
    os.environ.update(  # what `mlflow server` tells its workers; mlflow.server reads it when it is imported
        _MLFLOW_SERVER_FILE_STORE=args.store,
        _MLFLOW_SERVER_ARTIFACT_ROOT="mlflow-artifacts:/",
        _MLFLOW_SERVER_ARTIFACT_DESTINATION=args.artifacts,
        _MLFLOW_SERVER_SERVE_ARTIFACTS="true",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        MLFLOW_DISABLE_TELEMETRY="true",
    )
    from mlflow.server import app
    from mlflow.server.handlers import initialize_backend_stores
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            if str(code).startswith("5"):
                super().log_request(code, size)

    initialize_backend_stores(args.store, None, "mlflow-artifacts:/")
    port = socket.socket(fileno=os.dup(args.fd)).getsockname()[1]
    make_server("127.0.0.1", port, app, threaded=True, request_handler=Quiet, fd=args.fd).serve_forever()


if __name__ == "__main__":
    main()
