"""The entry point of the process that supervises the Deployments on this machine.
`Deployments.apply` starts the process of this module, which continues after the run has ended.

    python -m argolocal.runner.supervise_deployments \\
        --home .argolocal --cluster argolocal.runner.cluster:LocalCluster
"""

import argparse
import asyncio
from importlib import import_module
from pathlib import Path

from argolocal.common.processes import wait_until_recorded
from argolocal.controllers.deployment_supervisor import Supervisor


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m argolocal.runner.supervise_deployments", description=__doc__
    )
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument(
        "--cluster", required=True, help="MODULE:CLASS of the cluster that applied the objects"
    )
    parsed_arguments = parser.parse_args()
    wait_until_recorded()
    module_name, _, class_name = parsed_arguments.cluster.partition(":")
    asyncio.run(
        Supervisor(getattr(import_module(module_name), class_name)(parsed_arguments.home)).run()
    )


if __name__ == "__main__":
    main()
