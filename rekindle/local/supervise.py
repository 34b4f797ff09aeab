"""The process that supervises one Deployment; `Deployments.apply` starts it, and it outlives the run.

python -m rekindle.local.supervise --home .rekindle --name demo
"""

import argparse
import asyncio
from pathlib import Path

from rekindle.local.controllers.supervisor import Supervisor
from rekindle.local.emulator import LocalCluster
from rekindle.local.processes import wait_until_recorded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.local.supervise", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    wait_until_recorded()
    asyncio.run(Supervisor(LocalCluster(args.home), args.name).run())


if __name__ == "__main__":
    main()
