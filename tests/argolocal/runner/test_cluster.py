"""Tests of this machine as a cluster: objects, addresses and images of pods."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from argolocal.controllers.controller import LAST_APPLIED_ANNOTATION, Controller
from argolocal.errors import ConfigError
from argolocal.pods.container_images import Image
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path, {"other": Image("/other/python")})


def make_config_map(name: str, **data: str) -> dict:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_configmaps_and_secrets_are_read_by_name(cluster: LocalCluster) -> None:
    Controller(cluster, "ConfigMap").apply(make_config_map("mine", a="1"))
    coded = base64.b64encode("päss".encode()).decode()

    secret = {
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"x": coded},
        "stringData": {"y": "plain"},
    }

    Controller(cluster, "Secret").apply(secret)
    assert cluster.configmap("mine") == {"a": "1"}
    assert cluster.secret("s") == {"x": "päss", "y": "plain"}

    with pytest.raises(KeyError):
        cluster.configmap("none")

    assert cluster.image("any").python == sys.executable
    assert cluster.image("other").python == "/other/python"


def test_every_pod_has_its_own_address_and_keeps_it(cluster: LocalCluster) -> None:
    pods = [f"pod-{index}" for index in range(300)]
    addresses = {pod: cluster.address(pod) for pod in pods}
    assert len(set(addresses.values())) == len(pods)
    assert {pod: LocalCluster(cluster.home).address(pod) for pod in pods} == addresses
    assert all(
        address.startswith("127.") and not address.startswith("127.0.")
        for address in addresses.values()
    )


def test_concurrent_processes_never_assign_an_address_twice(cluster: LocalCluster) -> None:
    program = (
        "import sys; from pathlib import Path; from argolocal.runner.cluster import LocalCluster\n"
        "print(*[LocalCluster(Path(sys.argv[1])).address(f'{sys.argv[2]}-{i}') for i in range(50)])"
    )
    command = [sys.executable, "-c", program, str(cluster.home)]
    racers = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(2)
    ]
    addresses = [address for racer in racers for address in racer.communicate()[0].split()]
    assert len(addresses) == len(set(addresses)) == 100


def test_apply_merges_objects_like_kubectl(cluster: LocalCluster) -> None:
    kind = Controller(cluster, "HorizontalPodAutoscaler")

    def hpa(**spec: object) -> dict:
        return {
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "a", "labels": {"x": "1"}},
            "spec": spec,
        }

    first_object = kind.apply(hpa(minReplicas=1, maxReplicas=3, gone=True))
    assert first_object["metadata"]["generation"] == 1
    assert first_object["metadata"]["namespace"] == "default"
    assert kind.apply(hpa(minReplicas=1, maxReplicas=3, gone=True)) == first_object, (
        "applied again, nothing changes"
    )
    kind.change(
        "a", lambda now: now and now | {"status": {"s": 1}, "spec": now["spec"] | {"others": 7}}
    )
    second_object = kind.apply(hpa(minReplicas=2, maxReplicas=3))
    assert second_object["spec"] == {"minReplicas": 2, "maxReplicas": 3, "others": 7}
    assert second_object["status"] == {"s": 1}
    assert second_object["metadata"]["generation"] == 2
    assert second_object["metadata"]["uid"] == first_object["metadata"]["uid"]
    assert int(second_object["metadata"]["resourceVersion"]) > int(
        first_object["metadata"]["resourceVersion"]
    )
    assert LAST_APPLIED_ANNOTATION in second_object["metadata"]["annotations"]
    assert kind.delete("a")
    assert kind.get("a") is None
    assert not kind.delete("a")

    with pytest.raises(ConfigError, match=r"metadata\.name"):
        kind.apply({"spec": {}})


def test_images_are_read_from_the_home(tmp_path: Path) -> None:
    table = tmp_path / "images.yaml"
    table.write_text(
        "tool:v1: {command: [sh, -c], args: ['echo own'], env: {A: b}, directory: /usr}"
    )
    image = LocalCluster(tmp_path).image("tool:v1")

    assert image.command == ["sh", "-c"]
    assert image.args == ["echo own"]
    assert image.env == {"A": "b"}
    assert image.directory == "/usr"

    for text, error in (
        ("tool: {comand: [sh]}", r"tool\.comand"),
        ("tool: {command: sh}", "a list"),
        ("[", "is not YAML"),
        ("x: 1", "map"),
    ):
        table.write_text(text)
        with pytest.raises(ConfigError, match=error):
            LocalCluster(tmp_path)


def test_a_container_without_a_command_runs_the_command_of_its_image(tmp_path: Path) -> None:
    (tmp_path / "images.yaml").write_text(
        "tool: {command: [sh, -c, 'echo $A $0'], args: [own], env: {A: b}}"
    )
    cases = ("tool", None, "b own\n"), ("tool", ["given"], "b given\n")

    cases += (
        ("busybox:1", ["echo", "x"], "x\n"),
        ("busybox:1", None, ""),
        ("docker.io/python:3", None, ""),
    )

    for index, (image, args, log) in enumerate(cases):
        container = {"image": image, **({"args": args} if args else {})}
        manifest = make_workflow({"name": "main", "container": container}, name=f"w{index}")
        assert execute_manifest(manifest, {}, LocalCluster(tmp_path))["phase"] == "Succeeded"
        assert (tmp_path / f"runs/w{index}/logs/w{index}.log").read_text() == log
