"""The server of a home (a directory of runs) runs queued runs, and serves the page of runs and the
API of an Argo server.

    server = Server(cluster, "argolocal.view.foreground:execute_queued", open_store)
    server.serve(page, port=None, announce=print)    # until SIGINT or SIGTERM

Each run is a separate process, which continues after the end of the server. The next server of the
home watches the runs that an earlier server has started.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from argolocal.errors import describe, write_stderr
from argolocal.page import server as page_server
from argolocal.page.sources import LocalRuns
from argolocal.page.tabs.artifact_source import ObjectReader
from argolocal.runner.cluster import LocalCluster
from argolocal.server.api.application import WithApi, make_api
from argolocal.server.api.backend import NAMESPACE, Backend
from argolocal.server.api.catalogue import RunCatalogue
from argolocal.server.cron.controller import KIND, CronController
from argolocal.server.objects import Objects
from argolocal.server.queue import Queue
from argolocal.server.run_processes import RunProcesses
from argolocal.server.server_lock import ServerLock

# seconds between two checks of the queue, to which other processes may have added runs
POLL_INTERVAL_S = 0.1
OpenStore = Callable[[Mapping[str, Any]], ObjectReader]
# seconds until a duty is repeated after an error, such as a full disk
RETRY_INTERVAL_S = 5.0


class Server:
    """The queue and the stored objects of a home (a directory of runs), and the thread that starts
    runs.

    `execute` is the function, as MODULE:FUNCTION that runs a queued run. `open_store`: function
    that returns the store for the field `s3` of an artifact. `parallelism`: maximum number of runs
    at the same time (default: the number of CPU cores).
    """

    def __init__(
        self,
        cluster: LocalCluster,
        execute: str,
        open_store: OpenStore,
        parallelism: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cluster = cluster
        self.open_store = open_store
        self.processes = RunProcesses(cluster.home, execute)
        self.queue = Queue(cluster, self.processes.start, parallelism)
        self.objects = Objects(cluster, clock)
        self.schedules = CronController(cluster, self.objects, clock)
        self.ending = threading.Event()

    def describe(self) -> str:
        """Return a description of the server for the user who starts it."""
        schedule_count = len(self.objects.names(KIND))
        return (
            f"The server runs up to {self.queue.parallelism} workflows of {self.cluster.home} at"
            f" the same time. Schedules: {schedule_count}.\nCtrl-C ends the server. Its runs"
            " continue, and the next server watches them."
        )

    def serve(self, page: ASGIApp, port: int | None, announce: Callable[[str], None]) -> None:
        """Serve a page and run queued runs until SIGINT or SIGTERM. Raises Busy if the home (the
        directory of runs) already has a server, and ConfigError if the port is taken.

        `announce`: function to call with the URL of the page, which contains the token.
        """
        token = page_server.read_token(self.cluster.home)
        listening_socket = page_server.listen(port)
        actual_port = listening_socket.getsockname()[1]

        with ServerLock(self.cluster.home, actual_port), self.processes:
            worker = threading.Thread(target=self._work, name="queue")
            worker.start()
            try:
                page_server.serve(self._with_api(page), token, listening_socket, announce)
            finally:
                self.ending.set()
                worker.join()

    def _with_api(self, page: ASGIApp) -> ASGIApp:
        run_catalogue = RunCatalogue(LocalRuns(self.cluster.home), NAMESPACE)
        run_catalogue.warm_up()
        backend = Backend(self.cluster, self.queue, self.objects, run_catalogue, self.open_store)
        return WithApi(make_api(backend), page)

    def _work(self) -> None:
        # call `schedules` first, because the queue removes the entries of ended runs, and the
        # schedules must see these entries before
        duties = [Duty(self.schedules.reconcile), Duty(self.queue.start_next)]
        while not self.ending.is_set():
            for duty in duties:
                duty.perform()
            self.processes.wait(POLL_INTERVAL_S)


class Duty:
    """A function that the server calls again and again. An error of a duty is printed and only
    delays the next call of this duty, so that the server continues when the user has repaired the
    cause, such as a full disk or a damaged file. The same error of a duty is not printed twice in
    succession."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.earliest_call = 0.0
        self.last_message = ""

    def perform(self) -> None:
        """Call the function of this duty, unless it has just failed."""
        if time.monotonic() < self.earliest_call:
            return
        try:
            self.function()
            self.last_message = ""
        except Exception as error:
            self.earliest_call = time.monotonic() + RETRY_INTERVAL_S
            message = describe(error)
            if message != self.last_message:
                write_stderr(f"error: {message}")
            self.last_message = message
