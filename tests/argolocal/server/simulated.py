"""A server whose clock is the number in a file: python -m tests.argolocal.server.simulated CLOCK"""

import os
import sys
from pathlib import Path

from starlette.applications import Starlette

from argolocal.common.homes import require_home
from argolocal.page.tabs.artifact_source import StoredArtifacts
from argolocal.runner.cluster import LocalCluster
from argolocal.server.server import Server


def main() -> None:
    file = Path(sys.argv[1])
    cluster = LocalCluster(require_home())
    server = Server(
        cluster,
        "argolocal.view.foreground:execute_queued",
        StoredArtifacts.in_home(cluster.home, cluster.bucket).open_store,
        parallelism=4,
        clock=lambda: float(file.read_text()),
    )
    server.serve(Starlette(), None, lambda address: None)


if __name__ == "__main__":
    # remove the variable, because after `argolocal server`, only the home decides which modules are
    # found
    os.environ.pop("ARGOLOCAL_PATH", None)
    main()
