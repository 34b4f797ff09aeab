"""Tests of the object store and MLflow of `rekindle platform render --with minio --with mlflow`,
which keep their data on volumes.

Without a default StorageClass the volumes are folders that root creates on a node
(REKINDLE_TEST_RESTARTS=yes). REKINDLE_TEST_MINIO_IMAGE is the image of MinIO, if the default cannot
be pulled.
"""

import os
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.kube import Kube, Object
from tests.cluster.run import Namespace, rekindle

CLAIMS = ("mlflow", "minio")
MLFLOW = "from mlflow import MlflowClient; c = MlflowClient('http://localhost:5000')\n"
WRITE = """
run = c.create_run(c.create_experiment("kept"))
c.log_text(run.info.run_id, "kept too", "file.txt")
"""
READ = """
import mlflow; mlflow.set_tracking_uri("http://localhost:5000")
(run,) = c.search_runs([c.get_experiment_by_name("kept").experiment_id])
print(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/file.txt"))
"""


@pytest.fixture
def stores(namespace: Namespace) -> Iterator[Kube]:
    """A namespace with the object store and MLflow, and with a quota."""
    kube = Kube(f"{namespace.kube.namespace}-own")
    node = Kube(f"{namespace.kube.namespace}-disk")

    classes = Kube("default")(
        "get", "storageclasses", "-o", "jsonpath={.items[*].metadata.annotations}"
    )
    if "is-default-class" in classes:
        volumes = []
    else:
        volumes = [volume(kube.namespace, claim) for claim in CLAIMS]

    if volumes and os.environ.get("REKINDLE_TEST_RESTARTS") != "yes":
        pytest.skip("no default StorageClass, and no root on the nodes: REKINDLE_TEST_RESTARTS=yes")

    flags = ["--with", "mlflow", "--with", "minio", "--bucket", "kept", "--quota", "8", "16Gi"]
    images = {"mlflow": os.environ["REKINDLE_TEST_MLFLOW_IMAGE"], "rekindle": namespace.image}
    images |= {"minio": image} if (image := os.environ.get("REKINDLE_TEST_MINIO_IMAGE")) else {}
    flags += [flag for name, image in images.items() for flag in ("--image", f"{name}={image}")]
    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "something-long"}

    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "rekindle-s3"},
        "stringData": keys,
    }

    try:
        if volumes:
            start_root_pod(namespace, node)
            paths = [disk["spec"]["hostPath"]["path"] for disk in volumes]
            # fsGroup does not apply to a hostPath
            node("exec", "root", "--", "mkdir", "-p", "-m", "777", *paths)

        kube.apply(
            *volumes,
            *yaml.safe_load_all(rekindle("platform", "render", "-n", kube.namespace, *flags)),
            secret,
        )

        yield kube
    finally:
        if volumes:
            node("exec", "root", "--", "rm", "-rf", f"/var/tmp/{kube.namespace}", check=False)

        for client in (kube, node):
            client(
                "delete",
                "namespace",
                client.namespace,
                "--ignore-not-found",
                "--timeout=120s",
                timeout=150,
            )

        for disk in volumes:
            kube("delete", "persistentvolume", disk["metadata"]["name"], "--ignore-not-found")


def volume(namespace: str, claim: str) -> Object:
    """Return a volume in a folder of the node, for one PersistentVolumeClaim."""
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": f"/var/tmp/{namespace}/{claim}"},
        "claimRef": {"namespace": namespace, "name": claim},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    meta = {"name": f"{namespace}-{claim}"}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta, "spec": spec}


def start_root_pod(namespace: Namespace, node: Kube) -> None:
    """Start a pod that is root and mounts the node's /var/tmp."""
    node("create", "namespace", node.namespace)

    container = {
        "name": "root",
        "image": namespace.image,
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "disk", "mountPath": "/var/tmp"}],
    }

    spec = {
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "disk", "hostPath": {"path": "/var/tmp"}}],
    }

    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}, "spec": spec})
    node("wait", "pod/root", "--for=condition=Ready", "--timeout=240s", timeout=250)


def wait_until_ready(kube: Kube) -> None:
    for name in CLAIMS:
        kube("rollout", "status", f"deployment/{name}", "--timeout=300s", timeout=320)


def test_data_of_mlflow_and_the_object_store_survives_their_pods(stores: Kube) -> None:
    stores("wait", "job/minio-bucket", "--for=condition=Complete", "--timeout=300s", timeout=320)
    wait_until_ready(stores)
    stores("exec", "deployment/mlflow", "--", "python", "-c", MLFLOW + WRITE)
    stores("delete", "pods", "--all", "--grace-period=5")
    wait_until_ready(stores)
    assert (
        stores("exec", "deployment/mlflow", "--", "python", "-c", MLFLOW + READ).strip()
        == "kept too"
    )
