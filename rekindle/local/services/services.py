"""The embedded services: an S3 endpoint and MLflow, on 127.0.0.1, with their data under the home directory.

    services = Services(Path(".rekindle")); services.start(); services.ready(); services.environment()

They start with the first command that needs them, outlive it, and are shared by all later ones: each is recorded in
`services/<name>.json` (port, pid, start time). Two commands at once start one (flock). The listening socket is made
here and handed over, so that `start` returns at once and an early request waits instead of being refused; a service
that died is started again on the port it had. S3_ENDPOINT_URL and MLFLOW_TRACKING_URI name real ones instead.
"""

import fcntl
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from argolocal.common import homes
from argolocal.common.files import write_atomically, write_once
from argolocal.common.processes import confirm_recorded, end_group, is_alive, python, start_time
from rekindle.errors import RekindleError, StorageError, TrackingError, say, without_user

BUCKET = "rekindle"
REGION = "us-east-1"
GRACE = 5.0  # seconds that a service has to end
SERVICES = ("s3", "mlflow")
REAL = {"s3": "S3_ENDPOINT_URL", "mlflow": "MLFLOW_TRACKING_URI"}  # the variable that names a real one
LOGIN = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
CREDENTIALS, TOKEN = "credentials.json", "mlflow-token.json"  # files  # nosec B105
FAILS_WITH: dict[str, type[RekindleError]] = {"s3": StorageError, "mlflow": TrackingError}


@dataclass(frozen=True)
class Record:
    """A started service, as it is written down; pid 0: stopped."""

    name: str
    port: int
    pid: int
    since: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return is_alive(self.pid, self.since)


class Services:
    """The services of one home directory."""

    def __init__(self, home: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.home, self.folder, self.environ = home.resolve(), home.resolve() / "services", environ
        self.children: dict[str, subprocess.Popen] = {}
        self.used: set[str] = set()  # by this process

    def start(self, *names: str) -> None:
        """Start those of `names` (default: all) that do not run, unless a real one is configured. Returns at once."""
        for name in names or SERVICES:
            if self.environ.get(REAL[name]):
                continue
            self.used.add(name)
            if (record := self.find(name)) and record.alive:
                continue
            if (child := self.children.get(name)) and (code := child.poll()) and code > 0:
                raise self._broken(name, f"ended with code {code}")  # by itself: it would again
            if name == "mlflow":
                self.start("s3")
            with self._locked():
                self._launch(name)

    def keep(self) -> None:
        """Start those again that died without having been stopped, and those that this process uses, and say so."""
        for name in SERVICES:
            record = self.find(name)
            if name in self.used or (record and record.pid):
                if not (record and record.alive):
                    say(f"the embedded {name} service is gone: it is started again")
                self.start(name)

    def url(self, name: str) -> str:
        """Where a service is, started if need be. A real one must answer: StorageError or TrackingError if not."""
        if real := self.environ.get(REAL[name]):
            _reachable(name, real)
            return real
        self.start(name)
        record = self.find(name)
        if not record:
            raise FAILS_WITH[name](f"{self.folder}/{name}.json vanished: somebody else stops the services. Try again.")
        return record.url

    def environment(self) -> dict[str, str]:
        """What pods need to reach the services (the ConfigMap)."""
        self.start()
        return self.store() | {"MLFLOW_TRACKING_URI": self.url("mlflow")}

    def store(self) -> dict[str, str]:
        """The part of it about the object store, which alone is started if need be."""
        return {
            "S3_ENDPOINT_URL": self.url("s3"),
            "S3_BUCKET": self.environ.get("S3_BUCKET", BUCKET),
            "AWS_REGION": self.environ.get("AWS_REGION", REGION),
        }

    def credentials(self) -> dict[str, str]:
        """AWS_* of the S3 endpoint (the Secret): those of the environment for a real one, else this home's own."""
        if self.environ.get(REAL["s3"]):
            names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
            return {name: self.environ[name] for name in names if self.environ.get(name)}
        return self._keep_secret(
            CREDENTIALS,
            {"AWS_ACCESS_KEY_ID": secrets.token_hex(10).upper(), "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30)},
        )

    def login_page(self, page: str) -> str:
        """Return the address of a page of the embedded MLflow that logs a browser in."""
        address, _, fragment = page.partition("/#")
        return f"{address}/?token={self.login()[LOGIN[0]]}{fragment and '#' + fragment}"

    def login(self) -> dict[str, str]:
        """MLFLOW_TRACKING_* with which clients log in (in Secrets): those of the environment for a real MLflow, else
        the token of the embedded one, which is started if need be."""
        if self.environ.get(REAL["mlflow"]):
            return {name: self.environ[name] for name in LOGIN if self.environ.get(name)}
        self.start("mlflow")
        return self._token()

    def write_link(self, url: str) -> str:
        """The path of a file that leads to `url`: a browser's arguments can be seen by every user of the machine."""
        path = self.folder / "mlflow.html"
        self._make_folder()
        link = f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">'
        write_atomically(path, link, 0o600)
        return str(path)

    def _token(self) -> dict[str, str]:
        return self._keep_secret(TOKEN, {LOGIN[0]: secrets.token_urlsafe(32)})

    def _keep_secret(self, name: str, made: dict[str, str]) -> dict[str, str]:
        """The content of a file that only its owner can read; `made` becomes it if it is missing."""
        self._make_folder()
        return json.loads(write_once(self.folder / name, json.dumps(made), 0o600))

    def ready(self, timeout: float = 60) -> None:
        """Wait until all answer. Raises StorageError or TrackingError with the end of the log if one cannot."""
        until = time.monotonic() + timeout
        for name in SERVICES:
            while not answers(self.url(name) + ("/health" if name == "mlflow" else "")):
                if time.monotonic() > until:
                    raise self._broken(name, "does not answer")
                time.sleep(0.05)

    def find(self, name: str) -> Record | None:
        """The service as last recorded, alive or not."""
        try:
            return Record(**json.loads((self.folder / f"{name}.json").read_text()))
        except FileNotFoundError:
            return None

    def down(self) -> list[str]:
        """Stop what was started here and wait for the end. The data stays. Gives what was stopped."""
        self.used.clear()
        if not self.folder.exists():
            return []
        with self._locked():
            running = [record for name in reversed(SERVICES) if (record := self.find(name)) and record.alive]
            for record in running:
                end_group(record.pid, record.since, GRACE)
                try:
                    self._write(replace(record, pid=0, since=0))  # the port is kept
                except OSError:  # unless the disk is full
                    (self.folder / f"{record.name}.json").unlink(missing_ok=True)
            self._forget_token()
            for child in self.children.values():
                child.wait()
            return [record.name for record in running]

    def _forget_token(self) -> None:
        """Whoever listens on the port that MLflow had may be sent the token by a client that does not know it ended."""
        (self.folder / TOKEN).unlink(missing_ok=True)

    def _broken(self, name: str, what: str) -> RekindleError:
        log = self.folder / f"{name}.log"
        tail = "\n".join(log.read_text().splitlines()[-8:])
        return FAILS_WITH[name](f"The embedded {name} service {what}. {log} ends:\n{tail}")

    def _launch(self, name: str) -> None:
        before = self.find(name)
        if before and before.alive:
            return  # somebody else was faster
        listening = _listen(before.port if before else 0)
        if name == "mlflow" and before and listening.getsockname()[1] != before.port:
            self._forget_token()
        with listening, open(self.folder / f"{name}.log", "ab") as log:
            child = subprocess.Popen(
                python("-m", *self._command(name, listening.fileno())),
                pass_fds=[listening.fileno()], start_new_session=True, cwd="/", env=self._environment(name),
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
            self.children[name] = child
            record = Record(name, listening.getsockname()[1], child.pid, start_time(child.pid) or 0)
        self._write(record)
        confirm_recorded(child)

    def _write(self, record: Record) -> None:
        write_atomically(self.folder / f"{record.name}.json", json.dumps(asdict(record)))

    def _command(self, name: str, fd: int) -> list[str]:
        common = ["--fd", str(fd), "--record", str(self.folder / f"{name}.json")]
        if name == "s3":
            return ["rekindle.local.services.s3", *common, "--root", str(self.home / "s3"), "--bucket", BUCKET]
        bucket = self.environ.get("S3_BUCKET", BUCKET)
        store, artifacts = f"sqlite:///{self.home / 'mlflow.db'}", f"s3://{bucket}/mlflow"
        return ["rekindle.local.services.mlflow", *common, "--store", store, "--artifacts", artifacts]

    def _environment(self, name: str) -> dict[str, str]:
        env = {**self.environ, **self.credentials(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if name == "mlflow":
            env |= self._token()
            env |= {"MLFLOW_S3_ENDPOINT_URL": self.url("s3"), "AWS_DEFAULT_REGION": env.get("AWS_REGION", REGION)}
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
    """Whether an HTTP server answers there, be it with a refusal."""
    import urllib.error
    import urllib.request  # 40 ms, which a run that waits for nothing should not pay

    try:
        with urllib.request.urlopen(url, timeout=timeout):  # nosec B310  # our own
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def _reachable(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return  # MLflow also takes databases and managed services
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]), 3
        ):
            return
    except (OSError, ValueError) as error:  # ValueError: a port that is none
        raise FAILS_WITH[name](
            f"{REAL[name]} is {without_user(url)}, but nothing answers there ({error}). Start it or correct the "
            f"address; unset {REAL[name]} to use the embedded one."
        ) from error


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError:  # the port it had was taken by somebody else in the meantime
        return socket.create_server(("127.0.0.1", 0), backlog=128)
