"""A program that listens on all addresses of this machine prevents every pod from using its
port."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.frameworks import make_operator_environment
from rekindle.local.jobs.training_job import find_condition
from tests.polling import wait
from tests.ports import is_listening
from tests.waiting import until

LISTEN = (
    "import os, socket, sys; socket.create_server((os.environ['POD_IP'],"
    " int(sys.argv[1][7:]))).accept()"
)
# default port of an XGBoostJob
JOB_PORT = 9999


@pytest.fixture
def job_port() -> Iterator[int]:
    """Listen on all addresses at the default port of an XGBoostJob."""
    with contextlib.ExitStack() as stack:

        def listen() -> bool:
            # a job of another test may have the port until it ends
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("0.0.0.0", JOB_PORT)))
                return True
            return False

        until("the port is free", listen)
        yield JOB_PORT


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("0.0.0.0", 0)) as program:
        yield program.getsockname()[1]


def make_server(port: int) -> dict[str, Any]:
    """Return the Deployment of a server that has the flag --port."""
    container = {
        "name": "serve",
        "image": "python:3",
        "command": ["python", "-c", LISTEN],
        "args": [f"--port={port}"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": port}],
    }
    template = {"metadata": {"labels": {"app": "m"}}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "m"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "m"}, "spec": spec}


def make_service(port: int) -> dict[str, Any]:
    """Return the headless Service of the server."""
    ports = [{"name": "http", "port": port, "targetPort": "http"}]
    spec = {"selector": {"app": "m"}, "ports": ports, "clusterIP": "None"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "m"}, "spec": spec}


def xgboost_job(program: str) -> dict[str, Any]:
    container = {"name": "xgboost", "image": "any", "command": ["python", "-c", program]}
    master = {
        "replicas": 1,
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container]}},
    }

    spec = {"xgbReplicaSpecs": {"Master": master}}

    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "XGBoostJob",
        "metadata": {"name": "job"},
        "spec": spec,
    }


def test_model_servers_listen_at_another_port_and_clients_find_them(
    tmp_path: Path, taken: int
) -> None:
    cluster = LocalCluster(tmp_path)
    controllers = cluster.kinds.controllers(cluster, tmp_path)

    try:
        controllers["Service"].apply(make_service(taken))
        controllers["Deployment"].apply(make_server(taken))
        variables = cluster.service_variables()
        host = variables["M_SERVICE_HOST"]
        port = int(variables["M_SERVICE_PORT"])
        assert port != taken
        until("the Service listens", lambda: is_listening(port, host))
        until("the server is ready", lambda: cluster.overview()[0]["ready"] == 1)
    finally:
        cluster.down()


def test_the_pods_of_a_training_job_meet_at_another_port(tmp_path: Path, job_port: int) -> None:
    cluster = LocalCluster(tmp_path)
    jobs = cluster.kinds.controllers(cluster, tmp_path / "run")["XGBoostJob"]
    listen = (
        "import os, socket; socket.create_server((os.environ['MASTER_ADDR'],"
        " int(os.environ['MASTER_PORT'])))"
    )

    try:
        stored = jobs.apply(xgboost_job(listen))
        wait(jobs, lambda status: find_condition(status, "Succeeded"))

        port = make_operator_environment(stored, "Master", 0, str)["MASTER_PORT"]
        assert int(port) > job_port
        second_job = jobs.apply(xgboost_job(listen))
        assert make_operator_environment(second_job, "Master", 0, str)["MASTER_PORT"] == port
    finally:
        jobs.stop(0)
