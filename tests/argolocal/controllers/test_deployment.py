"""Deployments as real processes: rolling updates, probes, draining of connections, supervisors that
die, ports in use."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from argolocal.controllers.controller import Controller
from argolocal.controllers.deployment import Deployments
from argolocal.errors import ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.state.journal import RunFiles
from tests.argolocal.controllers.releases import (
    SERVER,
    get,
    is_answering,
    is_rolled_out,
    make_deployment,
    make_release,
    make_release_service,
    make_service,
    run_clients,
    wait,
)
from tests.waiting import until


@pytest.fixture
def kinds(cluster: LocalCluster) -> dict[str, Controller]:
    return cluster.kinds.controllers(cluster, cluster.home / "run")


def test_an_update_loses_no_request_and_the_old_version_drains(
    kinds: dict[str, Controller], cluster: LocalCluster, port: int
) -> None:
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    status = wait(kinds, is_rolled_out)
    assert [condition["reason"] for condition in status["conditions"]] == [
        "MinimumReplicasAvailable",
        "NewReplicaSetAvailable",
    ]
    until("version one to answer", lambda: is_answering(port, "one"))
    seen = []
    failed = []
    stop = threading.Event()
    slow = []

    def ask() -> None:
        while not stop.is_set():
            try:
                seen.append(get(port).split()[0])
            except OSError as error:
                failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    waiting = threading.Thread(target=lambda: slow.append(get(port, "/slow")))
    asking.start()
    obj = kinds["Deployment"].apply(make_deployment("two", slow=0.5))
    assert obj["status"]["observedGeneration"] == 2
    assert is_rolled_out(obj["status"]) is None, (
        "right after apply it is not what served before that counts"
    )
    waiting.start()
    wait(kinds, is_rolled_out)
    # one request more is allowed, because a request may be in progress
    since = len(seen) + 1
    waiting.join()
    until("more answers", lambda: len(seen) > since + 20 or failed)
    stop.set()
    asking.join()
    assert not failed
    assert seen[0] == "one"
    assert set(seen[since:]) == {"two"}
    assert slow[0].startswith("one"), "the answer came from the version that had the connection"
    logs = cluster.home / "deployments/fraud/logs"
    wait(kinds, lambda _: "drained one" in "".join(path.read_text() for path in logs.iterdir()))


def test_a_switch_to_another_deployment_and_back_loses_no_request(
    kinds: dict[str, Controller], cluster: LocalCluster, port: int
) -> None:
    kinds["Deployment"].apply(make_release("1"))
    kinds["Service"].apply(make_release_service("1", port))
    wait(kinds, lambda _: is_answering(port, "1"))

    with run_clients(port) as seen:
        kinds["Deployment"].apply(make_release("2"))
        headless_service = make_release_service("2", 8080, clusterIP="None") | {
            "metadata": {"name": "fraud-2"}
        }
        kinds["Service"].apply(headless_service)
        host = cluster.service_variables()["FRAUD_2_SERVICE_HOST"]
        wait(kinds, is_rolled_out, name="fraud-2")

        with urllib.request.urlopen(f"http://{host}:8080/", timeout=10) as answer:
            assert answer.read().startswith(b"2"), "it is verified at an address of its own"

        assert set(seen) == {"1"}, "and no client has reached it"
        kinds["Service"].apply(make_release_service("2", port))
        # wait until no answer of version 1 is pending
        wait(kinds, lambda _: set(seen.latest.values()) == {"2"})
        kinds["Service"].apply(make_release_service("1", port))
        wait(kinds, lambda _: set(seen.latest.values()) == {"1"})

    assert set(seen) == {"1", "2"}


def make_route(*backends: dict[str, Any], **rule: Any) -> dict:
    """Return an HTTPRoute of the Service of the model."""
    spec = {"parentRefs": [{"name": "edge"}], "rules": [{"backendRefs": list(backends), **rule}]}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "fraud"},
        "spec": spec,
    }


def test_a_canary_gets_its_exact_share_of_requests_and_a_shadow_gets_copies(
    kinds: dict[str, Controller], cluster: LocalCluster, port: int
) -> None:
    counting = SERVER.replace(
        "def do_GET(self):", "def do_GET(self):\n        print('asked', self.path, flush=True)"
    )
    for version in ("1", "2"):
        obj = make_release(version)
        obj["spec"]["template"]["spec"]["containers"][0]["command"][2] = counting
        kinds["Deployment"].apply(obj)
        headless_service = make_release_service(version, 8080, clusterIP="None") | {
            "metadata": {"name": f"fraud-{version}"}
        }
        kinds["Service"].apply(headless_service)

    kinds["Service"].apply(make_release_service("1", port))
    for version in ("1", "2"):
        wait(kinds, is_rolled_out, name=f"fraud-{version}")

    wait(kinds, lambda _: is_answering(port, "1"))
    pods = cluster.service_variables()["FRAUD_2_SERVICE_ENDPOINTS"].split(",")
    with urllib.request.urlopen(f"http://{pods[0]}:8080/", timeout=10) as answer:
        assert len(pods) == 1
        assert answer.read().startswith(b"2"), "its pods are found one by one"

    backend = {"name": "fraud", "port": port}
    other = {"name": "fraud-2", "port": 8080}
    kinds["HTTPRoute"].apply(make_route(backend | {"weight": 75}, other | {"weight": 25}))
    wait(kinds, lambda _: get(port).startswith("2"))
    assert [get(port)[0] for _ in range(40)].count("2") == 10
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": other}}
    kinds["HTTPRoute"].apply(make_route(backend, filters=[mirror]))
    logs = cluster.home / "deployments/fraud-2/logs"

    def has_copied_all() -> bool:
        return "asked /copy" in "".join(path.read_text() for path in logs.iterdir())

    # wait until the previous route is no longer used
    wait(kinds, lambda _: {get(port)[0] for _ in range(20)} == {"1"})
    wait(kinds, lambda _: get(port, "/copy").startswith("1") and has_copied_all())
    assert {get(port)[0] for _ in range(20)} == {"1"}
    kinds["Deployment"].delete("fraud-2")
    assert {get(port)[0] for _ in range(20)} == {"1"}, (
        "a mirror that is gone costs nobody an answer"
    )


def test_the_error_for_a_port_of_another_model_names_that_model(
    kinds: dict[str, Controller], port: int
) -> None:
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    other = make_service(port)
    other["metadata"] = {"name": "digits"}
    with pytest.raises(
        ConfigError, match=f"Service digits: port {port} is used by Service fraud of this home"
    ):
        kinds["Service"].apply(other)


@pytest.mark.slow
def test_a_version_that_cannot_start_never_serves(kinds: dict[str, Controller], port: int) -> None:
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    wait(kinds, is_rolled_out)
    kinds["Deployment"].apply(
        make_deployment("two", program="import sys; sys.exit('the model is gone')")
    )
    status = wait(kinds, lambda status: is_rolled_out(status) is False)
    failed = next(
        condition for condition in status["conditions"] if condition["type"] == "Progressing"
    )
    assert failed["message"].endswith("the model is gone")
    assert status["readyReplicas"] == 1
    assert status["unavailableReplicas"] == 1
    assert is_answering(port, "one")
    kinds["Deployment"].apply(make_deployment("one"))
    wait(kinds, is_rolled_out)
    assert is_answering(port, "one")


@pytest.mark.slow
def test_a_deployment_without_progress_within_its_deadline_fails(
    kinds: dict[str, Controller],
) -> None:
    kinds["Deployment"].apply(make_deployment("one", slow=60, progressDeadlineSeconds=1))
    wait(kinds, lambda status: is_rolled_out(status) is False)


def test_pods_that_die_or_hang_are_restarted(
    kinds: dict[str, Controller], cluster: LocalCluster, port: int
) -> None:
    kinds["Service"].apply(make_service(port))
    kinds["Deployment"].apply(make_deployment("one", replicas=2))
    wait(kinds, lambda status: status.get("readyReplicas") == 2)
    first_pid = int(get(port).split()[1])
    os.kill(first_pid, signal.SIGKILL)
    wait(kinds, lambda status: status.get("readyReplicas") == 1)
    wait(kinds, lambda status: status.get("readyReplicas") == 2)
    pods = cluster.home / "deployments/fraud/pods"
    sick = next(pods.iterdir()) / "tmp/sick"
    sick.touch()
    wait(kinds, lambda status: status.get("readyReplicas") == 1)
    assert is_answering(port, "one"), "one that is not ready gets no connection"
    log = cluster.home / "deployments/supervisor.log"
    until("its liveness probe to fail", lambda: "liveness probe failed" in log.read_text())
    sick.unlink()
    wait(kinds, lambda status: status.get("readyReplicas") == 2)


def test_a_command_killed_while_it_records_a_supervisor_leaves_no_supervisor(
    kinds: dict[str, Controller], cluster: LocalCluster
) -> None:
    command = """
import json, os, signal, sys
from pathlib import Path
from argolocal.runner.cluster import LocalCluster
from argolocal.controllers.deployment import Deployments
def die(event, args):
    if event == "os.rename" and str(args[1]).endswith("supervisor.json"):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
Deployments(LocalCluster(Path(sys.argv[1]))).apply(json.loads(sys.argv[2]))
"""

    arguments = [
        sys.executable,
        "-c",
        command,
        str(cluster.home),
        json.dumps(make_deployment("one")),
    ]
    assert subprocess.run(arguments).returncode == -signal.SIGKILL
    kinds["Deployment"].apply(make_deployment("one"))
    wait(kinds, is_rolled_out)
    assert cluster.down() == ["deployment fraud"]
    supervisors = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in supervisors if str(cluster.home).encode() in command]


@pytest.mark.slow
def test_a_killed_supervisor_ends_its_pods_and_is_restarted(
    kinds: dict[str, Controller], cluster: LocalCluster, port: int
) -> None:
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    wait(kinds, is_rolled_out)
    until("version one to answer", lambda: is_answering(port, "one"))
    pod = int(get(port).split()[1])
    record = json.loads((cluster.home / "deployments/supervisor.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    until("its pod to end", lambda: not Path(f"/proc/{pod}").exists())
    assert not Deployments(cluster).running()

    shown = {
        "kind": "deployment",
        "name": "fraud",
        "address": f"http://127.0.0.1:{port}",
        "running": True,
    }

    wait(kinds, lambda _: shown | {"ready": 1} in cluster.overview())
    wait(kinds, lambda _: is_answering(port, "one"))
    assert not cluster.revive()
    record = json.loads((cluster.home / "deployments/supervisor.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    until("nobody to answer", lambda: not is_answering(port, "one"))

    def has_new_supervisor() -> bool:
        # send a request as a waiting run does, for example in its verify step
        cluster.poll()
        return is_answering(port, "one")

    until("version one to answer again", has_new_supervisor)
    assert cluster.service_variables() == {
        "FRAUD_SERVICE_HOST": "127.0.0.1",
        "FRAUD_SERVICE_PORT": str(port),
    }


@pytest.mark.slow
def test_deployments_that_down_stopped_run_only_when_applied_or_started_again(
    kinds: dict[str, Controller], cluster: LocalCluster, port: int
) -> None:
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    wait(kinds, is_rolled_out)
    assert cluster.down() == ["deployment fraud"]
    assert not cluster.revive()
    assert not is_answering(port, "one")
    kinds["Deployment"].apply(make_deployment("one"))
    wait(kinds, lambda _: is_answering(port, "one"))
    cluster.down()
    # send a request as the next run of the pipeline does
    Deployments(cluster).start()
    wait(kinds, lambda _: is_answering(port, "one"))


def test_a_deleted_deployment_no_longer_exists(kinds: dict[str, Controller], port: int) -> None:
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    wait(kinds, is_rolled_out)
    assert kinds["Deployment"].delete("fraud")
    assert kinds["Deployment"].get("fraud") is None
    assert not is_answering(port, "one")


def test_the_error_for_a_port_in_use_names_the_port_and_the_remedy(
    kinds: dict[str, Controller], port: int
) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=r"port \d+ .* choose another port") as error,
    ):
        kinds["Service"].check(make_service(port))
    assert str(port) in str(error.value)
    kinds["Deployment"].apply(make_deployment("one"))
    kinds["Service"].apply(make_service(port))
    wait(kinds, lambda _: is_answering(port, "one"))
    # the Service itself uses the port
    kinds["Service"].apply(make_service(port))


def test_the_error_for_an_unsupported_deployment_names_the_field(cluster: LocalCluster) -> None:
    wrong = make_deployment("one", strategy={"type": "Recreate"})
    with pytest.raises(ConfigError, match="strategy"):
        Deployments(cluster).apply(wrong)
    wrong = make_deployment("one")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"] = {
        "exec": {"command": ["true"]}
    }
    with pytest.raises(ConfigError, match="livenessProbe"):
        Deployments(cluster).apply(wrong)
    wrong = make_deployment("one", selector={"matchLabels": {"app": "other"}})
    with pytest.raises(ConfigError, match="matchLabels"):
        Deployments(cluster).apply(wrong)


def test_a_deployment_of_a_workflow_has_pods_only_while_the_workflow_runs(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    (tmp_path / "runs/demo-1").mkdir(parents=True)
    runner = RunFiles(tmp_path, "demo-1")
    runner.lock()
    env = [{"name": "MASTER_ADDR", "value": "demo-1-train-lead-0-0.demo-1-train"}]
    program = "import os, time; print(os.environ['MASTER_ADDR'], flush=True); time.sleep(99)"

    container = {
        "name": "worker",
        "image": "i",
        "command": [sys.executable, "-c", program],
        "env": env,
    }

    obj = {
        "kind": "Deployment",
        "metadata": {
            "name": "demo-1-train",
            "ownerReferences": [{"kind": "Workflow", "name": "demo-1"}],
        },
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}},
        },
    }

    kinds: dict[str, Controller] = {"Deployment": (deployments := Deployments(cluster))}

    try:
        deployments.apply(obj)
        pod_address = cluster.address("demo-1-train-lead-0-0")
        logs = tmp_path / "deployments/demo-1-train/logs"

        wait(
            kinds,
            lambda _: [log.read_text().strip() for log in logs.glob("*")] == [pod_address],
            name="demo-1-train",
        )

        runner.close()
        wait(kinds, lambda status: not status.get("replicas"), name="demo-1-train")
        runner.lock()
        wait(kinds, lambda status: status.get("replicas"), name="demo-1-train")
    finally:
        runner.close()
        deployments.delete("demo-1-train")
        deployments.down()
