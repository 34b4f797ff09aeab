"""The process that supervises the Deployments; `Deployments.apply` starts it, and it outlives the run.

python -m argolocal.runner.supervise --home .rekindle
"""

import argparse
import asyncio
from pathlib import Path

from argolocal.common.processes import wait_until_recorded
from argolocal.controllers.supervisor import Supervisor
from argolocal.runner.cluster import LocalCluster


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m argolocal.runner.supervise", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    args = parser.parse_args()
    wait_until_recorded()
    asyncio.run(Supervisor(LocalCluster(args.home)).run())


if __name__ == "__main__":
    main()
