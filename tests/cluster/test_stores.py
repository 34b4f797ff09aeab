"""An object store and an MLflow of one's own, as `platform render --with minio --with mlflow` makes them, on volumes.

Where the cluster has no StorageClass they are folders of a node, which root makes there (REKINDLE_TEST_RESTARTS=yes).
REKINDLE_TEST_MINIO_IMAGE is the image, where the default one cannot be pulled.
"""

import os
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.kube import Kube, Object
from tests.cluster.run import Place, rekindle

CLAIMS = ("mlflow", "minio")
MLFLOW = "from mlflow import MlflowClient; c = MlflowClient('http://localhost:5000')\n"
WRITE = """
run = c.create_run(c.create_experiment("kept"))
c.log_text(run.info.run_id, "kept as well", "file.txt")
"""
READ = """
import mlflow; mlflow.set_tracking_uri("http://localhost:5000")
(run,) = c.search_runs([c.get_experiment_by_name("kept").experiment_id])
print(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/file.txt"))
"""


@pytest.fixture
def own(place: Place) -> Iterator[Kube]:
    """A namespace with both, under a quota."""
    kube, node = Kube(f"{place.kube.namespace}-own"), Kube(f"{place.kube.namespace}-disk")
    classes = Kube("default")("get", "storageclasses", "-o", "jsonpath={.items[*].metadata.annotations}")
    volumes = [] if "is-default-class" in classes else [volume(kube.namespace, claim) for claim in CLAIMS]
    if volumes and os.environ.get("REKINDLE_TEST_RESTARTS") != "yes":
        pytest.skip("no default StorageClass, and no root on the nodes: REKINDLE_TEST_RESTARTS=yes")
    flags = ["--with", "mlflow", "--with", "minio", "--bucket", "kept", "--quota", "8", "16Gi"]
    images = {"mlflow": os.environ["REKINDLE_TEST_MLFLOW_IMAGE"], "rekindle": place.image}
    images |= {"minio": given} if (given := os.environ.get("REKINDLE_TEST_MINIO_IMAGE")) else {}
    flags += [flag for name, image in images.items() for flag in ("--image", f"{name}={image}")]
    keys = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "something-long"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "rekindle-s3"}, "stringData": keys}
    try:
        if volumes:
            shell(place, node)
            paths = [disk["spec"]["hostPath"]["path"] for disk in volumes]
            node("exec", "root", "--", "mkdir", "-p", "-m", "777", *paths)  # fsGroup does not reach a hostPath
        kube.apply(*volumes, *yaml.safe_load_all(rekindle("platform", "render", "-n", kube.namespace, *flags)), secret)
        yield kube
    finally:
        if volumes:
            node("exec", "root", "--", "rm", "-rf", f"/var/tmp/{kube.namespace}", check=False)
        for client in (kube, node):
            client("delete", "namespace", client.namespace, "--ignore-not-found", "--timeout=120s", timeout=150)
        for disk in volumes:
            kube("delete", "persistentvolume", disk["metadata"]["name"], "--ignore-not-found")


def volume(namespace: str, claim: str) -> Object:
    """A folder of the node for one claim."""
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": f"/var/tmp/{namespace}/{claim}"},
        "claimRef": {"namespace": namespace, "name": claim},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    meta = {"name": f"{namespace}-{claim}"}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta, "spec": spec}


def shell(place: Place, node: Kube) -> None:
    """A pod that is root and sees the node's /var/tmp."""
    node("create", "namespace", node.namespace)
    container = {
        "name": "root",
        "image": place.image,
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "disk", "mountPath": "/var/tmp"}],
    }
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    spec |= {"volumes": [{"name": "disk", "hostPath": {"path": "/var/tmp"}}]}
    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}, "spec": spec})
    node("wait", "pod/root", "--for=condition=Ready", "--timeout=240s", timeout=250)


def stand(kube: Kube) -> None:
    for name in CLAIMS:
        kube("rollout", "status", f"deployment/{name}", "--timeout=300s", timeout=320)


def test_what_mlflow_and_the_object_store_keep_is_there_after_their_pods_go(own: Kube) -> None:
    own("wait", "job/minio-bucket", "--for=condition=Complete", "--timeout=300s", timeout=320)
    stand(own)
    own("exec", "deployment/mlflow", "--", "python", "-c", MLFLOW + WRITE)
    own("delete", "pods", "--all", "--grace-period=5")
    stand(own)
    assert own("exec", "deployment/mlflow", "--", "python", "-c", MLFLOW + READ).strip() == "kept as well"
