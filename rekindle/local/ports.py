"""Ports of pods on this machine.

Each pod has a loopback address of its own, so pods do not take ports from each other. But a program
that listens on all addresses of this machine takes its port from every pod. If the manifest allows
it, the pods use another port instead.
"""

import copy
import errno
import socket

from argolocal.interfaces import Cluster
from argolocal.manifest.training_jobs import JOBS
from argolocal.manifest.types import Object
from rekindle.local.jobs.frameworks import find_port, replicas_of

PORTS_TO_TRY = 100


def usable_port(cluster: Cluster, default: int) -> int:
    """Return the first port at or above `default` that is free for all pods; `default` if the first
    PORTS_TO_TRY ports are taken."""
    # no pod has this name, so only a program that listens on all addresses can occupy a port of
    # this address
    address = cluster.address("no-pod")
    return next(
        (port for port in range(default, default + PORTS_TO_TRY) if _is_free(address, port)),
        default,
    )


def _is_free(address: str, port: int) -> bool:
    try:
        socket.create_server((address, port)).close()
    except OverflowError:
        return False
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def move_job_port(cluster: Cluster, job: Object, current_job: Object | None) -> Object:
    """Return the training job with a free port for its pods; a port that the job itself sets is not
    changed.

    `current_job`: the stored state of this job, whose pods already use a port.
    """
    if job["kind"] not in JOBS:
        return job

    name, default = JOBS[job["kind"]].port
    if not name or any(find_port(job, role) for role in replicas_of(job)):
        return job

    if current_job:
        current_ports = [find_port(current_job, role) for role in replicas_of(current_job)]
    else:
        current_ports = []

    port = next(filter(None, current_ports), None) or usable_port(cluster, default)
    if port == default:
        return job

    moved = copy.deepcopy(job)
    for replica in replicas_of(moved).values():
        container = replica["template"]["spec"]["containers"][0]
        container["ports"] = [
            *(container.get("ports") or []),
            {"name": name, "containerPort": port},
        ]

    return moved


def move_server_port(cluster: Cluster, deployment: Object) -> Object:
    """Return a Deployment whose server listens on a free port, if its arguments contain
    `--port=PORT`."""
    moved = copy.deepcopy(deployment)

    container = moved["spec"]["template"]["spec"]["containers"][0]
    for entry in container.get("ports") or []:
        default = entry["containerPort"]
        flag = f"--port={default}"

        arguments = container.get("args") or []
        if flag in arguments and (port := usable_port(cluster, default)) != default:
            entry["containerPort"] = port
            container["args"] = [
                f"--port={port}" if argument == flag else argument for argument in arguments
            ]

    return moved


def move_service_port(cluster: Cluster, service: Object) -> Object:
    """Return a headless Service with a free port, which clients read from the environment of their
    pod."""
    ports = [
        {**entry, "port": usable_port(cluster, entry["port"])} for entry in service["spec"]["ports"]
    ]
    return {**service, "spec": {**service["spec"], "ports": ports}}
