"""Runs MLflow's server for one machine in one process, protected by a token.

    python -m rekindle.local.services.mlflow --fd 3 --store sqlite:///mlflow.db \\
      --artifacts s3://b/mlflow --record FILE

`mlflow server` imports everything twice, in a parent that migrates the database and in a uvicorn
child, which takes 10 s of CPU time and 500 MB. The module mlflow.py serves the same Flask
application as `mlflow server --gunicorn-opts` from threads of the process that migrated the
database, which takes 3 s and half the memory.

Artifacts are proxied, so clients need only MLFLOW_TRACKING_URI and MLFLOW_TRACKING_TOKEN. The
server itself accesses the artifacts with MLFLOW_S3_ENDPOINT_URL and AWS_*. login.py reads only the
head of a request to refuse a request without the token. ASGI or WSGI middleware could refuse the
request only after the HTTP server has read it, in a thread of its own.
"""

import argparse
import io
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.processes import end_unless_recorded
from rekindle.kubernetes_names import MLFLOW_TRACKING_TOKEN
from rekindle.local.services.login import MlflowLogin
from rekindle.local.services.threaded_server import ConnectionServer
from rekindle.tracking import REMOVED

# root of every artifact location
ARTIFACT_ROOT = "mlflow-artifacts:/"
# allowed sources of model versions; the server does not read from these sources
SOURCE_PATTERN = "^(s3://|mlflow-artifacts:/(?!/)|runs:/|models:/|prompt)"


class RequestStream(io.RawIOBase):
    """The bytes of a request whose head has already been read: first `request_head`, then the bytes
    that arrive on the connection."""

    def __init__(self, request_head: bytes, connection: socket.socket) -> None:
        self.head = memoryview(request_head)
        self.connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.head:
            return self.connection.recv_into(buffer)
        byte_count = min(len(buffer), len(self.head))
        buffer[:byte_count] = self.head[:byte_count]
        self.head = self.head[byte_count:]
        return byte_count


def make_server_settings(store_uri: str, artifacts_uri: str) -> Mapping[str, str]:
    """Return the environment variables that mlflow.server reads on import, as `mlflow server` sets
    them."""
    return {
        "_MLFLOW_SERVER_FILE_STORE": store_uri,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": ARTIFACT_ROOT,
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": artifacts_uri,
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_CREATE_MODEL_VERSION_SOURCE_VALIDATION_REGEX": SOURCE_PATTERN,
    }


def confine_artifacts(artifacts_destination: str) -> None:
    """Restrict MLflow to artifacts below ARTIFACT_ROOT, which are stored in the bucket of
    `artifacts_destination`.

    Without this restriction, MLflow would also read paths on this machine, links, and every kind of
    address that its libraries support.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.server import handlers
    from mlflow.store.artifact.artifact_repository_registry import (
        get_registered_artifact_repositories,
    )
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    repository_types: dict[str, Any] = get_registered_artifact_repositories()
    make_repository = repository_types["s3"]
    bucket_uri = f"{artifacts_destination.rpartition('/')[0]}/"

    def make_confined(uri: str, **options: object) -> Any:
        # all objects of the bucket are allowed, because the page of a model version reads the
        # signature of its release
        if not uri.startswith(bucket_uri):
            raise MlflowException.invalid_parameter_value(
                f"{uri} is not below {bucket_uri}, where artifacts must be."
            )
        return make_repository(uri, **options)

    repository_types.clear()
    repository_types["s3"] = make_confined

    class Store(SqlAlchemyStore):
        def create_experiment(
            self, name: Any, artifact_location: Any = None, tags: Any = None
        ) -> Any:
            if artifact_location and (
                not artifact_location.startswith(ARTIFACT_ROOT)
                or artifact_location.startswith(f"{ARTIFACT_ROOT}/")
            ):
                raise MlflowException.invalid_parameter_value(
                    f"artifact_location is {artifact_location}: it must start with {ARTIFACT_ROOT},"
                    " or be left out."
                )
            return super().create_experiment(name, artifact_location, tags)

        def delete_run(self, run_id: object) -> None:
            """Delete an MLflow run. Also delete the data of the run if Rekindle's retention has
            marked the run for removal; the data of any other deleted run remains until `mlflow gc`
            removes it."""
            is_marked_removed = REMOVED in self.get_run(run_id).data.tags
            super().delete_run(run_id)
            if is_marked_removed:
                self._hard_delete_run(run_id)

    handlers._tracking_store_registry.register(
        "sqlite", lambda store_uri, artifact_uri: Store(store_uri, artifact_uri)
    )


def create_database(database_uri: str) -> None:
    """Create MLflow's database if the database is missing. The database is created in a temporary
    file, because MLflow cannot continue an interrupted creation."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    database_path = Path(database_uri.removeprefix("sqlite:///"))
    if database_path.exists():
        return

    new_database_path = database_path.with_name(f"{database_path.name}.new")
    new_database_path.unlink(missing_ok=True)
    database_engine = create_sqlalchemy_engine(f"sqlite:///{new_database_path}")
    _initialize_tables(database_engine)
    database_engine.dispose()
    new_database_path.replace(database_path)


def main() -> None:
    argument_parser = argparse.ArgumentParser(prog="python -m rekindle.local.services.mlflow")
    argument_parser.add_argument(
        "--fd", type=int, required=True, help="descriptor of the listening socket"
    )
    argument_parser.add_argument("--store", required=True, help="URI of the database")
    argument_parser.add_argument("--artifacts", required=True, help="s3:// URI for artifacts")

    argument_parser.add_argument(
        "--record",
        type=Path,
        required=True,
        help="exit when this file is missing or has another pid",
    )

    arguments = argument_parser.parse_args()

    login_token = os.environ.pop(MLFLOW_TRACKING_TOKEN, "")
    if not login_token:
        raise SystemExit(
            f"{MLFLOW_TRACKING_TOKEN} is not set: clients authenticate with this token. Set it."
        )

    end_unless_recorded(arguments.record)
    os.environ.update(make_server_settings(arguments.store, arguments.artifacts))
    from mlflow.server import app
    from mlflow.server.handlers import initialize_backend_stores
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def __init__(self, connection: socket.socket, request_head: bytes) -> None:
            self.head = request_head
            super().__init__(connection, connection.getpeername(), mlflow_server)

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(RequestStream(self.head, self.connection))

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            if str(code).startswith("5"):
                super().log_request(code, size)

    confine_artifacts(arguments.artifacts)
    create_database(arguments.store)
    initialize_backend_stores(arguments.store, None, ARTIFACT_ROOT)
    listening_socket = socket.socket(fileno=arguments.fd)
    server_port = listening_socket.getsockname()[1]
    # used only as data for Handler: this server is never started
    mlflow_server = make_server("127.0.0.1", server_port, app, threaded=True, fd=arguments.fd)
    mlflow_login = MlflowLogin(login_token, server_port)

    def answer(connection: socket.socket, request_head: bytes) -> bool:
        refusal = mlflow_login.answer(request_head)
        if refusal:
            connection.sendall(refusal)
        else:
            Handler(connection, request_head)
        return False

    ConnectionServer(listening_socket, answer).serve_forever()


if __name__ == "__main__":
    main()
