"""The embedded services: an S3 endpoint and MLflow, on 127.0.0.1, with their data in the home
directory.

    services = Services(Path(".rekindle")); services.start(); services.ready();
    services.environment()

The first command that needs a service starts it; the service outlives this command and serves all
later commands. The port, pid and start time of a service are in `services/<name>.json`. Concurrent
commands start only one process (flock). The command creates the listening socket and passes it to
the service, so `start` returns immediately and early requests wait instead of being refused. A dead
service is restarted on its previous port. Set S3_ENDPOINT_URL and MLFLOW_TRACKING_URI to use real
services.
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
from argolocal.common.files import write_atomically, write_once
from argolocal.common.json_text import to_json
from argolocal.common.processes import (
    confirm_recorded,
    end_group,
    is_alive,
    python_command,
    start_time,
)
from rekindle.documents import Document, parse, read_file
from rekindle.errors import (
    ConfigError,
    RekindleError,
    StorageError,
    TrackingError,
    format_address,
    say,
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

BUCKET = "rekindle"
DATABASE = "mlflow.db"  # file name of the embedded MLflow's database in the home
REGION = "us-east-1"
GRACE_S = 5.0  # maximum time until a service exits
SERVICES = ("s3", "mlflow")
# environment variables with the addresses of external services that replace the embedded services
ADDRESS_VARIABLES = {"s3": S3_ENDPOINT_URL, "mlflow": MLFLOW_TRACKING_URI}
LOGIN_VARIABLES = (MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)
CREDENTIALS_FILE, TOKEN_FILE = "credentials.json", "mlflow-token.json"  # file names  # nosec B105
ERROR_TYPES: dict[str, type[RekindleError]] = {"s3": StorageError, "mlflow": TrackingError}


class Record(Document):
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


class Secrets(RootModel[dict[str, str]]):
    """A file with secrets: name → value."""

    model_config = ConfigDict(strict=True)


class Services:
    """The services of one home directory."""

    def __init__(self, home: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.home, self.folder, self.environ = home.resolve(), home.resolve() / "services", environ
        self.children: dict[str, subprocess.Popen] = {}
        self.used_names: set[str] = set()  # names of services that this process uses

    def start(self, *names: str) -> None:
        """Start the services `names` (default: all), except services that run already, and services
        that a real service replaces (ADDRESS_VARIABLES). Returns immediately."""
        for name in names or SERVICES:
            if self.environ.get(ADDRESS_VARIABLES[name]):
                continue

            self.used_names.add(name)
            record = self.find(name)
            if record and record.alive:
                continue

            child = self.children.get(name)
            if child and (code := child.poll()) and code > 0:
                # the service has exited with an error, so another start would not help
                raise self._error(name, f"ended with code {code}")

            if name == "mlflow":
                self.start("s3")

            with self._locked():
                self._launch(name)

    def restart_dead(self) -> None:
        """Restart dead services, and report each restart. A service that another command has
        stopped is restarted only if this process uses it."""
        for name in SERVICES:
            record = self.find(name)
            if name in self.used_names or (record and record.pid):
                if not (record and record.alive):
                    say(f"the embedded {name} service has died: restarting it")
                self.start(name)

    def url(self, name: str) -> str:
        """Return the address of a service; start the service if needed.

        Raises StorageError or TrackingError if a real service is down.
        """
        real_url = self.environ.get(ADDRESS_VARIABLES[name])
        if real_url:
            check_reachable(name, real_url)
            return real_url

        self.start(name)
        record = self.find(name)
        if not record:
            raise ERROR_TYPES[name](
                f"{self.folder}/{name}.json was deleted by another command. Try again."
            )

        return record.url

    def environment(self) -> dict[str, str]:
        """Start the services, and return the environment variables with their addresses for pods
        (the ConfigMap)."""
        self.start()
        return self.store_environment() | {MLFLOW_TRACKING_URI: self.url("mlflow")}

    def store_environment(self) -> dict[str, str]:
        """Return the variables of the object store. Starts only the object store."""
        return {
            S3_ENDPOINT_URL: self.url("s3"),
            S3_BUCKET: self.environ.get(S3_BUCKET, BUCKET),
            "AWS_REGION": self.environ.get("AWS_REGION", REGION),
        }

    def credentials(self) -> dict[str, str]:
        """Return the credentials of the object store (the Secret): from the environment for a real
        S3, from the home for the embedded one."""
        if self.environ.get(ADDRESS_VARIABLES["s3"]):
            names = (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "AWS_SESSION_TOKEN")
            return {name: self.environ[name] for name in names if self.environ.get(name)}
        return self._keep_secret(
            CREDENTIALS_FILE,
            {
                AWS_ACCESS_KEY_ID: secrets.token_hex(10).upper(),
                AWS_SECRET_ACCESS_KEY: secrets.token_urlsafe(30),
            },
        )

    def serving_token(self) -> dict[str, str]:
        """Return the tokens that the model servers of this home accept. Also write the header
        `Authorization: Bearer TOKEN`, with the first token, to a file for clients."""
        self._make_folder()
        text = write_once(self.folder / "token", secrets.token_urlsafe(32), 0o600)
        # for `curl -H @FILE`: all users of the machine can see the arguments of a command
        header = f"Authorization: Bearer {text.split()[0]}\n"
        write_atomically(self.authorization_file, header, 0o600)
        return {REKINDLE_TOKEN: text}

    @property
    def authorization_file(self) -> Path:
        """The file with the header that a client of the model servers sends."""
        return self.folder / "authorization"

    def store_serving_token(self) -> None:
        """Store $REKINDLE_TOKEN, if it is set, as the tokens of this home, because the model
        servers are started by another process than this one.

        Raises ConfigError.
        """
        text = self.environ.get(REKINDLE_TOKEN)
        if text is None:
            return

        if not text.strip() or not text.isascii():
            raise ConfigError(
                f"{REKINDLE_TOKEN} contains no token or other characters than ASCII: set it to one"
                " or more tokens, separated by spaces or lines, or unset it."
            )

        self._make_folder()
        write_atomically(self.folder / "token", " ".join(text.split()), 0o600)

    def login_page(self, page: str) -> str:
        """Return an address that logs a browser in to the embedded MLflow and then shows `page`, an
        address of MLflow."""
        address, _, fragment = page.partition("/#")
        return (
            f"{address}/?token={self.login()[MLFLOW_TRACKING_TOKEN]}{fragment and '#' + fragment}"
        )

    def login(self) -> dict[str, str]:
        """Return MLFLOW_TRACKING_* for clients (in Secrets): for a real MLflow from the
        environment, else start the embedded MLflow and return its token."""
        if self.environ.get(ADDRESS_VARIABLES["mlflow"]):
            return {name: self.environ[name] for name in LOGIN_VARIABLES if self.environ.get(name)}
        self.start("mlflow")
        return self._token()

    def _token(self) -> dict[str, str]:
        return self._keep_secret(TOKEN_FILE, {MLFLOW_TRACKING_TOKEN: secrets.token_urlsafe(32)})

    def _keep_secret(self, name: str, initial: dict[str, str]) -> dict[str, str]:
        """Return the content of a file that only its owner can read; write `initial` if the file is
        missing."""
        self._make_folder()
        path = self.folder / name
        return parse(Secrets, write_once(path, to_json(initial), 0o600), str(path)).root

    def ready(self, timeout: float = 60) -> None:
        """Wait until all services answer. Raises StorageError or TrackingError with the last lines
        of the service's log."""
        deadline = time.monotonic() + timeout
        for name in SERVICES:
            while not answers(self.url(name) + ("/health" if name == "mlflow" else "")):
                if time.monotonic() > deadline:
                    raise self._error(name, "does not answer")
                time.sleep(0.05)

    def find(self, name: str) -> Record | None:
        """Return the record of a running or dead service; None if it was never started."""
        path = self.folder / f"{name}.json"
        if path.exists():
            return read_file(Record, path)
        return None

    def down(self) -> list[str]:
        """Stop the services of this home and wait for their end; keep the data. Return the
        services' names."""
        self.used_names.clear()
        if not self.folder.exists():
            return []

        with self._locked():
            running_services = [
                record
                for name in reversed(SERVICES)
                if (record := self.find(name)) and record.alive
            ]
            for record in running_services:
                end_group(record.pid, record.since, GRACE_S)
                try:
                    # the record keeps the port for the next start
                    self._write(record.model_copy(update={"pid": 0, "since": 0}))
                except OSError:  # the disk is full: delete the record
                    (self.folder / f"{record.name}.json").unlink(missing_ok=True)

            self._forget_token()
            for child in self.children.values():
                child.wait()

            return [record.name for record in running_services]

    def _forget_token(self) -> None:
        """Delete the token, because clients of the stopped MLflow may send it to another process
        that now uses the port."""
        (self.folder / TOKEN_FILE).unlink(missing_ok=True)

    def _error(self, name: str, problem: str) -> RekindleError:
        log = self.folder / f"{name}.log"
        tail = log.read_text().splitlines()[-8:]
        return ERROR_TYPES[name](f"The embedded {name} service {problem}. {log} ends:", *tail)

    def _launch(self, name: str) -> None:
        previous_record = self.find(name)
        if previous_record and previous_record.alive:
            return  # another command has started the service

        listening_socket = _listen(previous_record.port if previous_record else 0)
        if (
            name == "mlflow"
            and previous_record
            and listening_socket.getsockname()[1] != previous_record.port
        ):
            self._forget_token()

        with listening_socket, open(self.folder / f"{name}.log", "ab") as log:
            child = subprocess.Popen(
                python_command("-m", *self._command(name, listening_socket.fileno())),
                pass_fds=[listening_socket.fileno()],
                start_new_session=True,
                cwd="/",
                env=self._environment(name),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

            self.children[name] = child
            record = Record(
                name=name,
                port=listening_socket.getsockname()[1],
                pid=child.pid,
                since=start_time(child.pid) or 0,
            )

        self._write(record)
        confirm_recorded(child)

    def _write(self, record: Record) -> None:
        write_atomically(self.folder / f"{record.name}.json", to_json(record.model_dump()))

    def _command(self, name: str, fd: int) -> list[str]:
        common_flags = ["--fd", str(fd), "--record", str(self.folder / f"{name}.json")]
        if name == "s3":
            return [
                "rekindle.local.services.s3",
                *common_flags,
                "--root",
                str(self.home / "s3"),
                "--bucket",
                BUCKET,
            ]

        bucket = self.environ.get(S3_BUCKET, BUCKET)
        store = f"sqlite:///{self.home / DATABASE}"
        artifacts = f"s3://{bucket}/mlflow"

        return [
            "rekindle.local.services.mlflow",
            *common_flags,
            "--store",
            store,
            "--artifacts",
            artifacts,
        ]

    def _environment(self, name: str) -> dict[str, str]:
        env = remove_secrets(self.environ, needs_services=name == "mlflow")
        env.update({**self.credentials(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})
        if name == "mlflow":
            env.update(self._token())
            env.update(
                {
                    "MLFLOW_S3_ENDPOINT_URL": self.url("s3"),
                    "AWS_DEFAULT_REGION": env.get("AWS_REGION", REGION),
                }
            )
        return env

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._make_folder()
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> None:
        homes.make(self.home)
        self.folder.mkdir(exist_ok=True)


def answers(url: str, timeout: float = 2) -> bool:
    """Return True if an HTTP server answers at `url` with a status below 500."""
    import urllib.error
    import urllib.request  # imported in this function, because the import takes 40 ms

    try:
        with urllib.request.urlopen(url, timeout=timeout):  # nosec B310  # our own URLs
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def check_reachable(name: str, url: str) -> None:
    """Raise an error unless a process listens at the address of a service."""
    if not url.startswith(("http://", "https://")):
        return  # not checked: MLflow also supports databases and managed services

    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        with socket.create_connection((parts.hostname or "", port), 3):
            return
    except (OSError, ValueError) as error:
        # do not show the ValueError: its text contains the invalid port, which may be a password
        reason = error if isinstance(error, OSError) else "its host or port is invalid"
        variable = ADDRESS_VARIABLES[name]
        raise ERROR_TYPES[name](
            f"{variable} is {format_address(url)}, but nothing answers at this address ({reason})."
            f" Start the service or correct the address; unset {variable} to use the embedded"
            " service."
        ) from error


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError:  # another process uses the previous port now
        return socket.create_server(("127.0.0.1", 0), backlog=128)
