"""MLflow's server as one process, for one machine and whoever has its token.

    python -m rekindle.local.services.mlflow --fd 3 --store sqlite:///mlflow.db --artifacts s3://b/mlflow --record FILE

`mlflow server` imports everything twice (a parent that migrates the database, a uvicorn child) and needs 10 CPU seconds
and 500 MB for it. This serves the same Flask application (what `mlflow server --gunicorn-opts` runs) from threads of
the process that migrated the database: 3 seconds and half the memory. Artifacts are proxied, so that clients need
nothing but MLFLOW_TRACKING_URI and MLFLOW_TRACKING_TOKEN; the server itself reaches them with MLFLOW_S3_ENDPOINT_URL
and AWS_*. login.py refuses requests without the token by their heads. A layer of ASGI or WSGI could not: it is called
by a server that reads, and keeps a thread for, whatever strangers send.
"""

import argparse
import io
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.processes import end_unless_recorded
from rekindle.local.services.connections import Connections
from rekindle.local.services.login import Login

TOKEN = "MLFLOW_TRACKING_TOKEN"  # nosec B105  # the variable
ROOT = "mlflow-artifacts:/"  # of every location of artifacts that MLflow may know
SOURCES = "^(s3://|mlflow-artifacts:/(?!/)|runs:/|models:/|prompt)"  # of model versions, which the server does not read


class Rest(io.RawIOBase):
    """A request whose head was read already: `head`, then what the connection brings."""

    def __init__(self, head: bytes, connection: socket.socket) -> None:
        self.head, self.connection = memoryview(head), connection

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not self.head:
            return self.connection.recv_into(into)
        size = min(len(into), len(self.head))
        into[:size], self.head = self.head[:size], self.head[size:]
        return size


def settings(store: str, artifacts: str) -> Mapping[str, str]:
    """What `mlflow server` tells its workers; mlflow.server reads it when it is imported."""
    return {
        "_MLFLOW_SERVER_FILE_STORE": store,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": ROOT,
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": artifacts,
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_CREATE_MODEL_VERSION_SOURCE_VALIDATION_REGEX": SOURCES,
    }


def confine(destination: str) -> None:
    """Keep MLflow from locations of artifacts but ROOT, which is `destination`, and from other stores than its bucket.

    It would follow a path on this machine, links in it, and every address that its libraries know.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.server import handlers
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    repositories: dict[str, Any] = get_registered_artifact_repositories()
    make, bucket = repositories["s3"], f"{destination.rpartition('/')[0]}/"

    def inside(uri: str, **options: Any) -> Any:
        if not uri.startswith(bucket):  # where releases lie, too, whose signature the page of a model version shows
            raise MlflowException.invalid_parameter_value(f"{uri} is not below {bucket}: artifacts are there.")
        return make(uri, **options)

    repositories.clear()
    repositories["s3"] = inside

    class Store(SqlAlchemyStore):
        def create_experiment(self, name: Any, artifact_location: Any = None, tags: Any = None) -> Any:
            if artifact_location and (
                not artifact_location.startswith(ROOT) or artifact_location.startswith(f"{ROOT}/")
            ):
                raise MlflowException.invalid_parameter_value(
                    f"artifact_location is {artifact_location}: it must begin with {ROOT}. Leave it out."
                )
            return super().create_experiment(name, artifact_location, tags)

    handlers._tracking_store_registry.register("sqlite", lambda store_uri, artifact_uri: Store(store_uri, artifact_uri))


def create_database(store: str) -> None:
    """Make the tables, if there are none, all or none: MLflow cannot finish what a full disk or a signal cut off."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    path = Path(store.removeprefix("sqlite:///"))
    if path.exists():
        return
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    engine = create_sqlalchemy_engine(f"sqlite:///{new}")
    _initialize_tables(engine)
    engine.dispose()
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.local.services.mlflow")
    parser.add_argument("--fd", type=int, required=True, help="a listening socket to serve on")
    parser.add_argument("--store", required=True, help="the database's URI")
    parser.add_argument("--artifacts", required=True, help="where artifacts are kept: an s3:// URI")
    parser.add_argument("--record", type=Path, required=True, help="it ends when this is gone or has another pid")
    args = parser.parse_args()
    if not (token := os.environ.pop(TOKEN, "")):
        raise SystemExit(f"{TOKEN} is not set: it is what clients must know. Set it.")
    end_unless_recorded(args.record)
    os.environ.update(settings(args.store, args.artifacts))
    from mlflow.server import app
    from mlflow.server.handlers import initialize_backend_stores
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def __init__(self, connection: socket.socket, head: bytes) -> None:
            self.head = head
            super().__init__(connection, connection.getpeername(), server)

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(Rest(self.head, self.connection))

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            if str(code).startswith("5"):
                super().log_request(code, size)

    confine(args.artifacts)
    create_database(args.store)
    initialize_backend_stores(args.store, None, ROOT)
    listening = socket.socket(fileno=args.fd)
    port = listening.getsockname()[1]
    server = make_server(
        "127.0.0.1", port, app, threaded=True, fd=args.fd
    )  # only what a Handler asks: it serves nothing
    login = Login(token, port)

    def answer(connection: socket.socket, head: bytes) -> bool:
        if refused := login.answer(head):
            connection.sendall(refused)
        else:
            Handler(connection, head)
        return False

    Connections(listening, answer).serve_forever()


if __name__ == "__main__":
    main()
