"""The server of a home: it runs queued runs, and serves the page of runs.

    server = Server(cluster, "argolocal.view.foreground:execute_queued", parallelism=None)
    server.serve(page, port=None, announce=print)    # until SIGINT or SIGTERM

Runs are processes of their own: they continue after the server has ended, and the next server
watches them.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from argolocal.errors import describe, say
from argolocal.page import server as page_server
from argolocal.runner.cluster import LocalCluster
from argolocal.server.objects import Objects
from argolocal.server.queue import Queue
from argolocal.server.run_processes import RunProcesses
from argolocal.server.server_lock import ServerLock

# seconds between looks at the queue; other processes also queue runs
POLL_INTERVAL_S = 0.1
# seconds after an error, such as a full disk
RETRY_INTERVAL_S = 5.0


class Server:
    """The queue and the stored objects of a home, and the thread that starts what is due.

    `execute`: MODULE:FUNCTION that runs a queued run. `parallelism`: number of runs at the same
    time (default: the number of cores).
    """

    def __init__(self, cluster: LocalCluster, execute: str, parallelism: int | None = None) -> None:
        self.cluster = cluster
        self.processes = RunProcesses(cluster.home, execute)
        self.queue = Queue(cluster, self.processes.start, parallelism)
        self.objects = Objects(cluster)
        # set when there may be something to do, or when the server ends
        self.wakeup = threading.Event()
        self.is_ending = False

    def submit(self, manifest: Mapping[str, Any], parameters: Mapping[str, str]) -> str:
        """Queue a run, start it at once if a place is free, and return its name. Raises
        ConfigError."""
        name = self.queue.submit(manifest, parameters)
        self.wakeup.set()
        return name

    def serve(self, page: ASGIApp, port: int | None, announce: Callable[[str], None]) -> None:
        """Serve a page and run queued runs until SIGINT or SIGTERM. Raises Busy if the home has a
        server, and ConfigError if the port is taken.

        `announce` gets the address of the page, which contains the token.
        """
        token = page_server.read_token(self.cluster.home)
        listening_socket = page_server.listen(port)
        actual_port = listening_socket.getsockname()[1]

        with ServerLock(self.cluster.home, actual_port), self.processes:
            worker = threading.Thread(target=self._work, name="queue")
            worker.start()
            try:
                page_server.serve(page, token, listening_socket, announce)
            finally:
                self.is_ending = True
                self.wakeup.set()
                worker.join()

    def do_due_work(self) -> None:
        """Start the runs that are due."""
        self.queue.start_next()

    def _work(self) -> None:
        last_message = ""
        while not self.is_ending:
            pause = POLL_INTERVAL_S
            try:
                self.do_due_work()
                last_message = ""
            except Exception as error:
                # the server must survive everything that a user can repair, such as a full disk
                pause = RETRY_INTERVAL_S
                message = describe(error)
                if message != last_message:
                    say(f"error: {message}")
                last_message = message

            self.wakeup.wait(pause)
            self.wakeup.clear()
