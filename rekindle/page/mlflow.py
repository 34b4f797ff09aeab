"""Connects the page to MLflow. Requests to the page never wait for MLflow, which takes seconds to
start."""

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Thread
from typing import Protocol

from rekindle import mlflow_api
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI
from rekindle.local.services.services import DATABASE_FILE, Services, is_answering

STARTING = "MLflow is starting: the models are shown in a few seconds."


class Tracking(Protocol):
    """Interface of the page to MLflow."""

    def connect(self) -> str:
        """Set the environment variables for requests to MLflow. Return "" if MLflow is available,
        else a sentence with the reason."""
        ...


class ExternalTracking:
    """The MLflow server at $MLFLOW_TRACKING_URI."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def connect(self) -> str:
        # requests to MLflow are not retried, since the user waits for the page
        os.environ[mlflow_api.RETRIES_VARIABLE] = "0"
        if self.environ.get(MLFLOW_TRACKING_URI):
            return ""
        return f"{MLFLOW_TRACKING_URI} is not set, so the releases of the models are not known."


class LocalTracking:
    """The embedded MLflow of REKINDLE_HOME or, if MLFLOW_TRACKING_URI is set, the MLflow server at
    this address.

    `environ`: the environment variables at the start of the page, because the page's own
    environment changes.
    """

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home
        self.services = Services(home, environ)
        self.external = ExternalTracking(environ)
        self.lock = Lock()
        self.is_starting = False
        self.ready_address = ""
        self.failure = ""

    def connect(self) -> str:
        if self.services.environ.get(MLFLOW_TRACKING_URI):
            return self.external.connect()
        if not (self.home / DATABASE_FILE).exists():
            return "MLflow was not used in this home yet: the first training starts it."

        record = self.services.find("mlflow")
        if record and record.alive and record.url == self.ready_address:
            os.environ[mlflow_api.RETRIES_VARIABLE] = "0"
            os.environ.update(self.services.login(), MLFLOW_TRACKING_URI=record.url)
            return ""

        failure = self.failure
        self._start()
        return failure or STARTING

    def _start(self) -> None:
        with self.lock:
            if self.is_starting:
                return
            self.is_starting = True
            self.failure = ""

        Thread(target=self._wait_until_ready, name="mlflow", daemon=True).start()

    def _wait_until_ready(self) -> None:
        try:
            address = self.services.url("mlflow")
            self.services.ready()
            if is_answering(f"{address}/health"):
                self.ready_address = address
        except RekindleError as error:
            self.failure = str(error)
        finally:
            self.is_starting = False
