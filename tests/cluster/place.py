"""A namespace of its own on whatever cluster kubectl leads to, with all that `rekindle platform render` makes.

    with made() as place: ...

NEEDED says what must be set. The operator's part (`rekindle platform render --operator`) must have been applied.
"""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import yaml

from rekindle.storage import Store
from tests.cluster.away import proxy
from tests.cluster.kube import Kube, Watch
from tests.cluster.run import Place, rekindle

NEEDED = {
    "REKINDLE_TEST_IMAGE": "the image `train`, as the cluster pulls it",
    "REKINDLE_TEST_MLFLOW_IMAGE": "the image `mlflow`",
    "REKINDLE_TEST_S3": "an S3 endpoint that pods and this machine reach",
    "AWS_ACCESS_KEY_ID": "of that endpoint",
    "AWS_SECRET_ACCESS_KEY": "of that endpoint",
}


@contextmanager
def made() -> Iterator[Place]:
    """A namespace with the platform in it; gone at the end, and its bucket with it."""
    missing = [f"{name} ({what})" for name, what in NEEDED.items() if not os.environ.get(name)]
    assert not missing, f"set {', '.join(missing)}"
    image, endpoint = os.environ["REKINDLE_TEST_IMAGE"], os.environ["REKINDLE_TEST_S3"]
    kube = Kube(f"rekindle-test-{uuid.uuid4().hex[:6]}")
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    store = Store(kube.namespace, endpoint, *keys)
    store.client.create_bucket(Bucket=store.bucket)
    watch = None
    try:
        kube.apply(*_platform(kube, image))
        kube.apply(*_proxied(image, endpoint))
        watch = Watch(kube)
        for name in ("s3-proxy", "mlflow", "mlflow-proxy"):
            kube("rollout", "status", f"deployment/{name}", "--timeout=300s", timeout=320)
        yield Place(kube, store, watch, image, _free_port())
    finally:
        if watch:
            watch.close()
        kube("delete", "namespace", kube.namespace, "--ignore-not-found", "--timeout=120s", timeout=150)
        store.delete([entry.key for entry in store.list("")])
        store.client.delete_bucket(Bucket=store.bucket)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _platform(kube: Kube, image: str) -> list[dict]:
    """The namespace as users make it, and the Secret that they are told to make."""
    mlflow = os.environ["REKINDLE_TEST_MLFLOW_IMAGE"]
    flags = ["--bucket", kube.namespace, "--endpoint", f"http://s3.{kube.namespace}.svc:9000"]
    flags += ["--with", "mlflow", "--with", "frameworks", "--ephemeral"]
    flags += ["--image", f"mlflow={mlflow}", "--image", f"rekindle={image}"]
    objects = list(yaml.safe_load_all(rekindle("platform", "render", "-n", kube.namespace, *flags)))
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "rekindle-s3"}, "stringData": keys}
    for manifest in objects:  # this machine is small
        if manifest["kind"] == "Deployment":
            manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "50m"
    serving = {**secret, "metadata": {"name": "rekindle-serving"}}
    return [*objects, secret, serving]


def _proxied(image: str, endpoint: str) -> list[dict]:
    """The object store and MLflow behind proxies that a test can take away."""
    parts = urlsplit(endpoint)
    server = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "mlflow-server"},
        "spec": {"selector": {"app.kubernetes.io/name": "mlflow"}, "ports": [{"port": 5000, "targetPort": "http"}]},
    }
    assert parts.hostname
    return [
        server,
        *proxy("s3", image, parts.hostname, parts.port or 80, listen=9000),
        *proxy("mlflow", image, "mlflow-server", 5000, listen=5000),
    ]
