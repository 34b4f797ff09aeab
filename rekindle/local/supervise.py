"""The process that supervises the Deployments; `Deployments.apply` starts it, and it outlives the run.

python -m rekindle.local.supervise --home .rekindle
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
    args = parser.parse_args()
    wait_until_recorded()
    asyncio.run(Supervisor(LocalCluster(args.home)).run())


if __name__ == "__main__":
    main()
