"""Ports of pods on this machine.

Each pod has a loopback address of its own, so pods do not take ports from each other. However, a
program that listens on all addresses of this machine takes its port from every pod. If the manifest
allows another port, the pods then use another port.
"""

import copy
import errno
import socket

from argolocal.interfaces import Cluster
from argolocal.manifest.training_jobs import JOB_KINDS
from argolocal.manifest.types import Object
from rekindle.local.jobs.frameworks import find_port, get_replica_specs

PORTS_TO_TRY = 100


def find_usable_port(cluster: Cluster, default_port: int) -> int:
    """Return the first port at or above `default_port` that is free for all pods; `default_port`
    if the first PORTS_TO_TRY ports are taken."""
    # no pod has this name, so only a program that listens on all addresses can occupy a port of
    # this address
    address = cluster.address("no-pod")
    return next(
        (
            port
            for port in range(default_port, default_port + PORTS_TO_TRY)
            if _is_free_port(address, port)
        ),
        default_port,
    )


def _is_free_port(address: str, port: int) -> bool:
    try:
        socket.create_server((address, port)).close()
    except OverflowError:
        return False
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def move_job_port(cluster: Cluster, training_job: Object, current_job: Object | None) -> Object:
    """Return the training job with a free port for its pods. A port that the job itself sets is
    kept.

    `current_job`: the stored state of this job, whose pods already use a port.
    """
    if training_job["kind"] not in JOB_KINDS:
        return training_job

    port_name, default_port = JOB_KINDS[training_job["kind"]].port
    if not port_name or any(
        find_port(training_job, role) for role in get_replica_specs(training_job)
    ):
        return training_job

    if current_job:
        current_ports = [find_port(current_job, role) for role in get_replica_specs(current_job)]
    else:
        current_ports = []

    port = next(filter(None, current_ports), None) or find_usable_port(cluster, default_port)
    if port == default_port:
        return training_job

    moved_job = copy.deepcopy(training_job)
    for replica_spec in get_replica_specs(moved_job).values():
        container = replica_spec["template"]["spec"]["containers"][0]
        container["ports"] = [
            *(container.get("ports") or []),
            {"name": port_name, "containerPort": port},
        ]

    return moved_job


def move_server_port(cluster: Cluster, deployment: Object) -> Object:
    """Return a Deployment whose server listens on a free port, if its arguments contain
    `--port=PORT`."""
    moved_deployment = copy.deepcopy(deployment)

    container = moved_deployment["spec"]["template"]["spec"]["containers"][0]
    for port_entry in container.get("ports") or []:
        default_port = port_entry["containerPort"]
        port_flag = f"--port={default_port}"

        container_arguments = container.get("args") or []
        if port_flag not in container_arguments:
            continue

        port = find_usable_port(cluster, default_port)
        if port != default_port:
            port_entry["containerPort"] = port
            container["args"] = [
                f"--port={port}" if container_argument == port_flag else container_argument
                for container_argument in container_arguments
            ]

    return moved_deployment


def move_service_port(cluster: Cluster, service: Object) -> Object:
    """Return a headless Service with a free port, which clients read from the environment of their
    pod."""
    moved_ports = [
        {**port_entry, "port": find_usable_port(cluster, port_entry["port"])}
        for port_entry in service["spec"]["ports"]
    ]
    return {**service, "spec": {**service["spec"], "ports": moved_ports}}
