"""The connection of the page to MLflow. Pages do not wait for the start of MLflow, which takes
seconds."""

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Thread
from typing import Protocol

from rekindle import mlflow_api
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI
from rekindle.local.services.services import DATABASE, Services, answers

STARTING = "MLflow is starting: the models are shown in a few seconds."


class Tracking(Protocol):
    """MLflow, as the page sees it."""

    def connect(self) -> str:
        """Make requests to MLflow possible. Return "", or a sentence that says why they are not
        possible now."""
        ...


class ExternalTracking:
    """The MLflow that the environment names."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def connect(self) -> str:
        # a page waits for a single attempt
        os.environ[mlflow_api.RETRIES] = "0"
        if self.environ.get(MLFLOW_TRACKING_URI):
            return ""
        return f"{MLFLOW_TRACKING_URI} is not set, so the releases of the models are not known."


class LocalTracking:
    """The embedded MLflow of a home, or the MLflow that the environment names.

    `environ`: the environment at the start of the page, because the page's own environment changes.
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
        if not (self.home / DATABASE).exists():
            return "MLflow was not used in this home yet: the first training starts it."

        record = self.services.find("mlflow")
        if record and record.alive and record.url == self.ready_address:
            os.environ[mlflow_api.RETRIES] = "0"
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
            if answers(f"{address}/health"):
                self.ready_address = address
        except RekindleError as error:
            self.failure = str(error)
        finally:
            self.is_starting = False
