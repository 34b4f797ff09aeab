"""Render the objects of configs/platform, which a namespace needs before pipelines can run in it.

The objects contain no credentials, only the name of a Secret; `secret_command` returns the command
that creates it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from string import Template
from typing import Any
from urllib.parse import urlsplit

import yaml

from argolocal.language.yaml_text import parse, read_text
from rekindle import project
from rekindle.blocks.manifest.render import order_keys, to_yaml
from rekindle.blocks.pod_settings import Manifest
from rekindle.errors import ConfigError, did_you_mean, format_address
from rekindle.kubernetes_names import (
    AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY,
    NAME_LABEL,
    STORE_SECRET,
)

REQUIRED_FILES = ("namespace", "accounts", "addresses", "network")
COMPONENTS = ("mlflow", "minio", "frameworks", "prometheus", "retraining")
IMAGES = {
    "rekindle": "rekindle:0.1",
    "mlflow": "rekindle-mlflow:0.1",
    "minio": (
        "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z"
        "@sha256:14cea493d9a34af32f524e538b8346cf79f3321eff8e708c1e2960462bd8936e"
    ),
}
CLUSTER_WIDE_KINDS = ("Namespace",)
KEY_NAMES = (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)
NAMESPACE_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
BUCKET_PATTERN = re.compile(r"[a-z0-9][-.a-z0-9]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Platform:
    """The settings of a platform. Raises ConfigError if the settings are invalid or conflict."""

    namespace: str
    bucket: str = "rekindle"
    endpoint: str = ""  # address of the object store; if empty, AWS or the MinIO in `components`
    region: str = ""
    mlflow: str = ""  # address of MLflow; if empty, the MLflow in `components`
    components: tuple[str, ...] = ()
    iam: bool = False  # True: pods use a cloud (IAM) role instead of the Secret with keys
    quota: tuple[str, str] | None = None  # quota of the namespace: total CPU and memory requests
    # True: MLflow and MinIO keep their data only as long as their pods exist
    ephemeral: bool = False
    images: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, pattern, rule in (
            (
                "namespace",
                self.namespace,
                NAMESPACE_PATTERN,
                "lower-case letters, digits and dashes, at most 63",
            ),
            (
                "bucket",
                self.bucket,
                BUCKET_PATTERN,
                "3 to 63 lower-case letters, digits, dashes and dots",
            ),
        ):
            if not pattern.fullmatch(value):
                raise ConfigError(f'the {name} is "{value}": it must be {rule}.')

        for name, url in (("endpoint", self.endpoint), ("MLflow", self.mlflow)):
            parts = urlsplit(url)
            if format_address(url) != url:
                raise ConfigError(
                    f"the address of {name} contains a user, a password or a query: put them into a"
                    " Secret."
                )

            if url and (parts.scheme not in ("http", "https") or not parts.netloc):
                raise ConfigError(
                    f'the address of {name} is "{url}": it must be http(s)://HOST[:PORT].'
                )

            if url and name == "endpoint" and parts.path.strip("/"):
                raise ConfigError(
                    f'the endpoint is "{url}": it must not have a path; --bucket names the bucket.'
                )

        for name in self.images:
            if name not in IMAGES:
                raise ConfigError(
                    f'--image: "{name}" must be one of'
                    f" {', '.join(IMAGES)}.{did_you_mean(name, set(IMAGES))}"
                )

        if self.endpoint and "minio" in self.components:
            raise ConfigError(
                f"the endpoint is {self.endpoint}, and --with minio adds an endpoint: choose one."
            )

        if self.mlflow and "mlflow" in self.components:
            raise ConfigError(
                f"MLflow is at {self.mlflow}, and --with mlflow adds a server: choose one of them."
            )

        if not self.mlflow and "mlflow" not in self.components:
            raise ConfigError(
                "MLflow is missing: give its address (--mlflow URL), or add a server (--with"
                " mlflow)."
            )

        if self.iam and "minio" in self.components:
            raise ConfigError(
                "MinIO does not support cloud roles: leave out --iam, and create a Secret with"
                " keys."
            )

    @property
    def values(self) -> dict[str, str]:
        if "minio" in self.components:
            endpoint = f"http://minio.{self.namespace}.svc:9000"
        else:
            endpoint = self.endpoint

        images = {**IMAGES, **self.images}
        cpu, memory = self.quota or ("", "")

        return {
            "namespace": self.namespace,
            "bucket": self.bucket,
            "endpoint": endpoint,
            "region": self.region,
            "mlflow": self.mlflow or f"http://mlflow.{self.namespace}.svc:5000",
            "repository": yaml.safe_dump(
                {"archiveLogs": True, "s3": _artifact_repository(self, endpoint)}, sort_keys=False
            ),
            "image": images["rekindle"],
            "mlflow_image": images["mlflow"],
            "minio_image": images["minio"],
            "cpu": cpu,
            "memory": memory,
        }


def render_platform(platform: Platform) -> list[Manifest]:
    """Return all objects, in the order in which they must be applied."""
    files = [
        *REQUIRED_FILES,
        *(["quota"] if platform.quota else []),
        *(n for n in COMPONENTS if n in platform.components),
    ]

    objects = [
        manifest
        for file in files
        for manifest in _render_file(file, platform.values, platform.namespace)
    ]

    (serving,) = (
        o for o in objects if (o["kind"], o["metadata"]["name"]) == ("NetworkPolicy", "serving")
    )
    serving["spec"]["egress"] += _egress_to_store(platform)

    if platform.iam:
        _remove_secret(objects)
    if platform.ephemeral:
        return _without_claims(objects)

    return objects


def operator_patch(namespace: str = "kubeflow") -> list[Manifest]:
    """Return the patch of the training operator in configs/platform/operator.yaml, which shows how
    to apply it."""
    return list(_render_file("operator", {}, namespace))


def to_yaml_documents(objects: list[Manifest]) -> str:
    return "---\n".join(map(to_yaml, objects))


def secret_command(
    namespace: str, name: str = STORE_SECRET, keys: Iterable[str] = KEY_NAMES
) -> str:
    """Return the command that creates a Secret from a file, so that the values do not appear in
    process lists and the shell's history."""
    lines = " and ".join(f"{key}=..." for key in keys)
    command = f"kubectl -n {namespace} create secret generic {name} --from-env-file=FILE"
    return f"{command}    # FILE: {lines}, each on its own line"


def _egress_to_store(platform: Platform) -> list[Manifest]:
    """Return the egress rules of a NetworkPolicy for the object store.

    Rules for an object store in the cluster select its pods by labels instead of the port, since
    the port of the pods may differ from the port of the Service.
    """
    parts = urlsplit(platform.values["endpoint"] or "https://s3.amazonaws.com")

    name, _, rest = (parts.hostname or "").partition(".")
    if rest.split(".")[1:2] == ["svc"]:
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": rest.partition(".")[0]}}
        if "minio" in platform.components:
            pods = {"podSelector": {"matchLabels": {NAME_LABEL: name}}}
        else:
            pods = {}

        egress: list[Manifest] = [{"to": [{"namespaceSelector": namespace, **pods}]}]
    else:
        egress = [{"ports": [{"port": parts.port or (80 if parts.scheme == "http" else 443)}]}]

    # also allow the services that issue the credentials of a cloud role
    if platform.iam:
        egress += [{"ports": [{"port": 443}]}, {"to": [{"ipBlock": {"cidr": "169.254.0.0/16"}}]}]

    return egress


def list_permissions(name: str = "accounts") -> Iterator[tuple[str, str, str]]:
    """Yield (API group, resource, verb) of each permission that a file of configs/platform
    grants."""
    for manifest in _render_file(name, {"namespace": "any"}, "any"):
        for rule in manifest.get("rules", []):
            for group in rule["apiGroups"]:
                yield from (
                    (group, resource, verb)
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                )


def _render_file(name: str, values: dict[str, str], namespace: str) -> Iterator[Manifest]:
    file = project.REFERENCE / f"configs/platform/{name}.yaml"
    try:
        documents = parse(read_text(file), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}): run rekindle from a checkout."
        ) from error

    for document in documents:
        manifest = order_keys(_substitute(document, values))
        if manifest["kind"] == "ConfigMap":
            manifest["data"] = {key: value for key, value in manifest["data"].items() if value}
        if manifest["kind"] not in CLUSTER_WIDE_KINDS:
            manifest["metadata"]["namespace"] = namespace

        yield manifest


def _substitute(node: object, values: dict[str, str]) -> Any:
    """Replace the placeholders in the parsed YAML, so that a value cannot change the structure of
    the YAML."""
    if isinstance(node, dict):
        return {key: _substitute(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_substitute(item, values) for item in node]
    if isinstance(node, str):
        return Template(node).substitute(values)
    return node


def _artifact_repository(platform: Platform, endpoint: str) -> dict[str, Any]:
    """Return the configuration of the bucket as Argo's artifact repository."""
    parts = urlsplit(
        endpoint or f"https://s3.{platform.region + '.' if platform.region else ''}amazonaws.com"
    )
    repository: dict[str, Any] = {"bucket": platform.bucket, "endpoint": parts.netloc}

    if parts.scheme == "http":
        repository["insecure"] = True
    if platform.region:
        repository["region"] = platform.region
    if platform.iam:
        return repository | {"useSDKCreds": True}

    keys = {"accessKeySecret": AWS_ACCESS_KEY_ID, "secretKeySecret": AWS_SECRET_ACCESS_KEY}
    return repository | {field: {"name": STORE_SECRET, "key": key} for field, key in keys.items()}


def _remove_secret(objects: list[Manifest]) -> None:
    """Remove references to the Secret with keys, which does not exist if pods use a cloud role."""
    for spec in _pod_specs(objects):
        for container in spec["containers"]:
            container["envFrom"] = [
                e
                for e in container["envFrom"]
                if e.get("secretRef", {}).get("name") != STORE_SECRET
            ]


def _without_claims(objects: list[Manifest]) -> list[Manifest]:
    """Replace PersistentVolumeClaims by `emptyDir` volumes, whose data is lost with the pod."""
    for spec in _pod_specs(objects):
        for volume in spec.get("volumes", []):
            if volume.pop("persistentVolumeClaim", None):
                volume["emptyDir"] = {}
    return [manifest for manifest in objects if manifest["kind"] != "PersistentVolumeClaim"]


def _pod_specs(objects: list[Manifest]) -> Iterator[Manifest]:
    yield from (
        o["spec"]["template"]["spec"] for o in objects if o["kind"] in ("Deployment", "Job")
    )
