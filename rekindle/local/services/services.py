"""The embedded services: an S3 endpoint and MLflow, on 127.0.0.1, with their data in the home
directory.

    services = Services(Path(".rekindle"))
    services.start()
    services.ready()
    services.environment()

The first command that needs an embedded service starts the service, which outlives the command and
serves all later commands. The port, pid and start time of a service are in `services/<name>.json`.
A file lock ensures that concurrent commands start only one process of a service. The command
creates the listening socket and passes the socket to the service. Because the command owns the
socket, `start` returns immediately, and requests that arrive before the service is ready wait
instead of being refused. A service whose process has ended is restarted on its previous port. Set
S3_ENDPOINT_URL and MLFLOW_TRACKING_URI to use other services instead.
"""

import fcntl
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, RootModel

from argolocal.common import homes
from argolocal.common.environment import remove_secrets
from argolocal.common.files import write_atomically, write_if_missing
from argolocal.common.json_text import to_json
from argolocal.common.processes import (
    confirm_recorded,
    is_alive,
    make_python_command,
    read_start_ticks,
    terminate_group,
)
from rekindle.documents import Document, parse, read_file
from rekindle.errors import (
    ConfigError,
    RekindleError,
    StorageError,
    TrackingError,
    format_address,
    write_stderr,
)
from rekindle.kubernetes_names import (
    AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY,
    MLFLOW_TRACKING_PASSWORD,
    MLFLOW_TRACKING_TOKEN,
    MLFLOW_TRACKING_URI,
    MLFLOW_TRACKING_USERNAME,
    REKINDLE_TOKEN,
    S3_BUCKET,
    S3_ENDPOINT_URL,
)

DEFAULT_BUCKET = "rekindle"
# file name of the embedded MLflow's database in REKINDLE_HOME
DATABASE_FILE = "mlflow.db"
DEFAULT_REGION = "us-east-1"
# maximum time in seconds until a stopped service exits
STOP_GRACE_S = 5.0
SERVICE_NAMES = ("s3", "mlflow")
# environment variables with the addresses of external services that replace the embedded services
ADDRESS_VARIABLES = {"s3": S3_ENDPOINT_URL, "mlflow": MLFLOW_TRACKING_URI}
LOGIN_VARIABLES = (MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)
# file names  # nosec B105
CREDENTIALS_FILE, TOKEN_FILE = "credentials.json", "mlflow-token.json"
ERROR_TYPES: dict[str, type[RekindleError]] = {"s3": StorageError, "mlflow": TrackingError}


class ServiceRecord(Document):
    """The saved record of a service; the pid of a stopped service is 0."""

    name: str = Field(pattern="^(s3|mlflow)$")
    port: int = Field(ge=1, le=65535)
    pid: int = Field(ge=0)
    since: int = Field(ge=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return is_alive(self.pid, self.since)


class SecretsFile(RootModel[dict[str, str]]):
    """A file with secrets: name → value."""

    model_config = ConfigDict(strict=True)


class Services:
    """The services of one home directory."""

    def __init__(self, home_folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.home = home_folder.resolve()
        self.folder = self.home / "services"
        self.environ = environment
        self.children: dict[str, subprocess.Popen] = {}
        # names of services that this process uses
        self.used_names: set[str] = set()

    def start(self, *service_names: str) -> None:
        """Start the services `service_names` (default: all), except services that run already, and
        services that an external service replaces (ADDRESS_VARIABLES). Returns immediately."""
        for service_name in service_names or SERVICE_NAMES:
            if self.environ.get(ADDRESS_VARIABLES[service_name]):
                continue

            self.used_names.add(service_name)
            service_record = self.find(service_name)
            if service_record and service_record.alive:
                continue

            child_process = self.children.get(service_name)
            exit_code = child_process.poll() if child_process else None
            if exit_code and exit_code > 0:
                # the service has exited with an error, so another start would not help
                raise self._make_error(service_name, f"ended with code {exit_code}")

            if service_name == "mlflow":
                self.start("s3")

            with self._hold_lock():
                self._launch_service(service_name)

    def restart_dead(self) -> None:
        """Restart services whose processes have ended, and report each restart. A service that
        another command has stopped is restarted only if this process uses it."""
        for service_name in SERVICE_NAMES:
            service_record = self.find(service_name)
            if service_name in self.used_names or (service_record and service_record.pid):
                if not (service_record and service_record.alive):
                    write_stderr(f"the embedded {service_name} service has died: restarting it")
                self.start(service_name)

    def url(self, service_name: str) -> str:
        """Return the address of a service; start the service if needed.

        Raises StorageError or TrackingError if an external service is unreachable.
        """
        configured_url = self.environ.get(ADDRESS_VARIABLES[service_name])
        if configured_url:
            check_reachable(service_name, configured_url)
            return configured_url

        self.start(service_name)
        service_record = self.find(service_name)
        if not service_record:
            raise ERROR_TYPES[service_name](
                f"{self.folder}/{service_name}.json was deleted by another command. Try again."
            )

        return service_record.url

    def environment(self) -> dict[str, str]:
        """Start the services, and return the environment variables with their addresses for pods
        (the ConfigMap)."""
        self.start()
        return self.store_environment() | {MLFLOW_TRACKING_URI: self.url("mlflow")}

    def store_environment(self) -> dict[str, str]:
        """Return the environment variables with the address and keys of the object store. Only the
        object store is started."""
        return {
            S3_ENDPOINT_URL: self.url("s3"),
            S3_BUCKET: self.environ.get(S3_BUCKET, DEFAULT_BUCKET),
            "AWS_REGION": self.environ.get("AWS_REGION", DEFAULT_REGION),
        }

    def credentials(self) -> dict[str, str]:
        """Return the credentials of the object store, as the Secret contains them. The credentials
        of an external store are read from the environment, those of the embedded store from
        REKINDLE_HOME."""
        if self.environ.get(ADDRESS_VARIABLES["s3"]):
            variable_names = (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "AWS_SESSION_TOKEN")
            return {
                variable_name: self.environ[variable_name]
                for variable_name in variable_names
                if self.environ.get(variable_name)
            }
        return self._keep_secret_file(
            CREDENTIALS_FILE,
            {
                AWS_ACCESS_KEY_ID: secrets.token_hex(10).upper(),
                AWS_SECRET_ACCESS_KEY: secrets.token_urlsafe(30),
            },
        )

    def serving_token(self) -> dict[str, str]:
        """Return the tokens that the model servers of REKINDLE_HOME accept; create a token if no
        token exists. Also write the header Authorization with the first token to a file for
        clients."""
        self._make_folder()
        token_text = write_if_missing(self.folder / "token", secrets.token_urlsafe(32), 0o600)
        # for `curl -H @FILE`: all users of the machine can see the arguments of a command
        authorization_header = f"Authorization: Bearer {token_text.split()[0]}\n"
        write_atomically(self.authorization_file, authorization_header, 0o600)
        return {REKINDLE_TOKEN: token_text}

    @property
    def authorization_file(self) -> Path:
        """The file with the header that a client of the model servers sends."""
        return self.folder / "authorization"

    def store_serving_token(self) -> None:
        """If $REKINDLE_TOKEN is set, store its value as the tokens of REKINDLE_HOME, because
        another process will start the model servers.

        Raises ConfigError.
        """
        token_text = self.environ.get(REKINDLE_TOKEN)
        if token_text is None:
            return

        if not token_text.strip() or not token_text.isascii():
            raise ConfigError(
                f"{REKINDLE_TOKEN} contains no token or other characters than ASCII: set it to one"
                " or more tokens, separated by spaces or lines, or unset it."
            )

        self._make_folder()
        write_atomically(self.folder / "token", " ".join(token_text.split()), 0o600)

    def make_login_url(self, page_url: str) -> str:
        """Return an address that logs a browser in to the embedded MLflow and then shows
        `page_url`, an address of MLflow."""
        base_url, _, url_fragment = page_url.partition("/#")
        login_url = f"{base_url}/?token={self.login()[MLFLOW_TRACKING_TOKEN]}"
        if url_fragment:
            return f"{login_url}#{url_fragment}"
        return login_url

    def login(self) -> dict[str, str]:
        """Return the variables with which clients log in to MLflow, as Secrets contain them. For an
        external MLflow, the variables are read from the environment. Without an external MLflow,
        start the embedded MLflow, and return its token."""
        if self.environ.get(ADDRESS_VARIABLES["mlflow"]):
            return {
                variable_name: self.environ[variable_name]
                for variable_name in LOGIN_VARIABLES
                if self.environ.get(variable_name)
            }
        self.start("mlflow")
        return self._read_mlflow_token()

    def _read_mlflow_token(self) -> dict[str, str]:
        return self._keep_secret_file(
            TOKEN_FILE, {MLFLOW_TRACKING_TOKEN: secrets.token_urlsafe(32)}
        )

    def _keep_secret_file(self, file_name: str, initial_secrets: dict[str, str]) -> dict[str, str]:
        """Return the content of a file that only its owner can read; write `initial_secrets` if
        the file is missing."""
        self._make_folder()
        secret_path = self.folder / file_name
        return parse(
            SecretsFile,
            write_if_missing(secret_path, to_json(initial_secrets), 0o600),
            str(secret_path),
        ).root

    def ready(self, timeout_seconds: float = 60) -> None:
        """Wait until all services answer. Raises StorageError or TrackingError with the last lines
        of the service's log."""
        deadline_seconds = time.monotonic() + timeout_seconds
        for service_name in SERVICE_NAMES:
            while not is_answering(
                self.url(service_name) + ("/health" if service_name == "mlflow" else "")
            ):
                if time.monotonic() > deadline_seconds:
                    raise self._make_error(service_name, "does not answer")
                time.sleep(0.05)

    def find(self, service_name: str) -> ServiceRecord | None:
        """Return the record of a running or dead service; None if it was never started."""
        record_path = self.folder / f"{service_name}.json"
        if record_path.exists():
            return read_file(ServiceRecord, record_path)
        return None

    def down(self) -> list[str]:
        """Stop the services of REKINDLE_HOME and wait for their end; keep the data. Return the
        services' names."""
        self.used_names.clear()
        if not self.folder.exists():
            return []

        with self._hold_lock():
            service_records = [self.find(service_name) for service_name in reversed(SERVICE_NAMES)]
            running_services = [
                service_record
                for service_record in service_records
                if service_record and service_record.alive
            ]
            for service_record in running_services:
                terminate_group(service_record.pid, service_record.since, STOP_GRACE_S)
                try:
                    # the record keeps the port of the service for the next start
                    self._write(service_record.model_copy(update={"pid": 0, "since": 0}))
                except OSError:
                    # the record cannot be written, because the disk is full, so delete the record
                    (self.folder / f"{service_record.name}.json").unlink(missing_ok=True)

            self._delete_token()
            for child_process in self.children.values():
                child_process.wait()

            return [service_record.name for service_record in running_services]

    def _delete_token(self) -> None:
        """Delete the token of MLflow, because clients of the stopped MLflow may send the token to
        another process that now uses the port."""
        (self.folder / TOKEN_FILE).unlink(missing_ok=True)

    def _make_error(self, service_name: str, problem_text: str) -> RekindleError:
        log_file = self.folder / f"{service_name}.log"
        log_tail = log_file.read_text().splitlines()[-8:]
        return ERROR_TYPES[service_name](
            f"The embedded {service_name} service {problem_text}. {log_file} ends:", *log_tail
        )

    def _launch_service(self, service_name: str) -> None:
        previous_record = self.find(service_name)
        if previous_record and previous_record.alive:
            # another command has started the service
            return

        listening_socket = _create_listening_socket(previous_record.port if previous_record else 0)
        if (
            service_name == "mlflow"
            and previous_record
            and listening_socket.getsockname()[1] != previous_record.port
        ):
            self._delete_token()

        with listening_socket, open(self.folder / f"{service_name}.log", "ab") as log_file:
            child_process = subprocess.Popen(
                make_python_command(
                    "-m", *self._make_command(service_name, listening_socket.fileno())
                ),
                pass_fds=[listening_socket.fileno()],
                start_new_session=True,
                cwd="/",
                env=self._make_environment(service_name),
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
            )

            self.children[service_name] = child_process
            service_record = ServiceRecord(
                name=service_name,
                port=listening_socket.getsockname()[1],
                pid=child_process.pid,
                since=read_start_ticks(child_process.pid) or 0,
            )

        self._write(service_record)
        confirm_recorded(child_process)

    def _write(self, service_record: ServiceRecord) -> None:
        write_atomically(
            self.folder / f"{service_record.name}.json", to_json(service_record.model_dump())
        )

    def _make_command(self, service_name: str, socket_descriptor: int) -> list[str]:
        common_flags = [
            "--fd",
            str(socket_descriptor),
            "--record",
            str(self.folder / f"{service_name}.json"),
        ]
        if service_name == "s3":
            return [
                "rekindle.local.services.s3",
                *common_flags,
                "--root",
                str(self.home / "s3"),
                "--bucket",
                DEFAULT_BUCKET,
            ]

        bucket_name = self.environ.get(S3_BUCKET, DEFAULT_BUCKET)
        database_uri = f"sqlite:///{self.home / DATABASE_FILE}"
        artifacts_uri = f"s3://{bucket_name}/mlflow"

        return [
            "rekindle.local.services.mlflow",
            *common_flags,
            "--store",
            database_uri,
            "--artifacts",
            artifacts_uri,
        ]

    def _make_environment(self, service_name: str) -> dict[str, str]:
        environment = remove_secrets(self.environ, needs_services=service_name == "mlflow")
        environment.update({**self.credentials(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})
        if service_name == "mlflow":
            environment.update(self._read_mlflow_token())
            environment.update(
                {
                    "MLFLOW_S3_ENDPOINT_URL": self.url("s3"),
                    "AWS_DEFAULT_REGION": environment.get("AWS_REGION", DEFAULT_REGION),
                }
            )
        return environment

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        self._make_folder()
        with open(self.folder / "lock", "w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> None:
        homes.create_home(self.home)
        self.folder.mkdir(exist_ok=True)


def is_answering(url: str, timeout_seconds: float = 2) -> bool:
    """Return True if an HTTP server answers at `url` with a status below 500."""
    import urllib.error

    # imported only in this function, because the import takes 40 ms
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds):  # nosec B310  # our own URLs
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def check_reachable(service_name: str, url: str) -> None:
    """Raise an error unless a process listens at the address of a service."""
    if not url.startswith(("http://", "https://")):
        # not checked: MLflow also supports databases and managed services
        return

    try:
        url_parts = urlsplit(url)
        port = url_parts.port or {"http": 80, "https": 443}[url_parts.scheme]
        with socket.create_connection((url_parts.hostname or "", port), 3):
            return
    except (OSError, ValueError) as error:
        # the text of a ValueError is not shown, because it contains the invalid port, which may be
        # a password
        error_reason = error if isinstance(error, OSError) else "its host or port is invalid"
        address_variable = ADDRESS_VARIABLES[service_name]
        raise ERROR_TYPES[service_name](
            f"{address_variable} is {format_address(url)}, but nothing answers at this address"
            f" ({error_reason}). Start the service or correct the address; unset"
            f" {address_variable} to use the embedded service."
        ) from error


def _create_listening_socket(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError:
        # another process uses the previous port now
        return socket.create_server(("127.0.0.1", 0), backlog=128)
