"""Create a namespace on the cluster of kubectl, with the objects of `rekindle platform render`.

    with create_namespace() as namespace: ...

NEEDED lists the environment variables to set. `rekindle platform render --operator` must have been
applied before.
"""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import yaml

from rekindle.storage import Store
from tests.cluster.kube import Kube, Watch
from tests.cluster.outage import make_proxy
from tests.cluster.run import Namespace, rekindle

NEEDED_VARIABLES = {
    "REKINDLE_TEST_IMAGE": (
        "the image of tests/cluster/Dockerfile with its digest, as the cluster pulls it"
    ),
    "REKINDLE_TEST_MLFLOW_IMAGE": "the image `mlflow`",
    "REKINDLE_TEST_S3": "an S3 endpoint that pods and this machine reach",
    "AWS_ACCESS_KEY_ID": "the key of that endpoint",
    "AWS_SECRET_ACCESS_KEY": "the secret key of that endpoint",
}


@contextmanager
def create_namespace() -> Iterator[Namespace]:
    """Create a namespace with the objects of `rekindle platform render`; delete the namespace and
    its bucket at the end."""
    missing = [
        f"{name} ({description})"
        for name, description in NEEDED_VARIABLES.items()
        if not os.environ.get(name)
    ]

    assert not missing, f"set {', '.join(missing)}"
    image = os.environ["REKINDLE_TEST_IMAGE"]
    endpoint = os.environ["REKINDLE_TEST_S3"]
    assert "@sha256:" in image, (
        f"REKINDLE_TEST_IMAGE is {image}: name its digest, which the cache needs"
    )
    kube = Kube(f"rekindle-test-{uuid.uuid4().hex[:6]}")
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    store = Store(kube.namespace, endpoint, *keys)
    store.client.create_bucket(Bucket=store.bucket)
    watch = None

    try:
        kube.apply(*_render_platform(kube, image))
        kube.apply(*_make_proxies(image, endpoint))
        watch = Watch(kube)

        for name in ("s3-proxy", "mlflow", "mlflow-proxy"):
            kube("rollout", "status", f"deployment/{name}", "--timeout=300s", timeout=320)

        yield Namespace(kube, store, watch, image, _free_port())
    finally:
        if watch:
            watch.close()

        kube(
            "delete",
            "namespace",
            kube.namespace,
            "--ignore-not-found",
            "--timeout=300s",
            timeout=330,
        )

        store.delete([entry.key for entry in store.list("")])
        store.client.delete_bucket(Bucket=store.bucket)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _render_platform(kube: Kube, image: str) -> list[dict]:
    """Return the namespace and the Secrets in the way that users create them."""
    mlflow = os.environ["REKINDLE_TEST_MLFLOW_IMAGE"]
    flags = ["--bucket", kube.namespace, "--endpoint", f"http://s3.{kube.namespace}.svc:9000"]
    flags += ["--with", "mlflow", "--with", "frameworks", "--ephemeral"]
    flags += ["--image", f"mlflow={mlflow}", "--image", f"rekindle={image}"]
    objects = list(yaml.safe_load_all(rekindle("platform", "render", "-n", kube.namespace, *flags)))
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}

    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "rekindle-s3"},
        "stringData": keys,
    }

    for manifest in objects:  # request few resources, because the nodes are small
        if manifest["kind"] == "Deployment":
            manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"][
                "cpu"
            ] = "50m"

    serving = {**secret, "metadata": {"name": "rekindle-serving"}}
    return [*objects, secret, serving]


def _make_proxies(image: str, endpoint: str) -> list[dict]:
    """Return proxies of the object store and MLflow, which tests can stop."""
    parts = urlsplit(endpoint)

    server = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "mlflow-server"},
        "spec": {
            "selector": {"app.kubernetes.io/name": "mlflow"},
            "ports": [{"port": 5000, "targetPort": "http"}],
        },
    }

    assert parts.hostname

    return [
        server,
        *make_proxy("s3", image, parts.hostname, parts.port or 80, listen=9000),
        *make_proxy("mlflow", image, "mlflow-server", 5000, listen=5000),
    ]
