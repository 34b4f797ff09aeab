"""What a namespace needs once before pipelines run in it: the objects of configs/platform, filled in.

    rekindle platform render -n models --bucket models --mlflow https://mlflow.example.com | kubectl apply -f -

Credentials are referred to by name and never pass through here: `secret(namespace)` says how to make their Secret.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from string import Template
from typing import Any
from urllib.parse import urlsplit

import yaml

from rekindle import project
from rekindle.blocks.pod import SECRET, Manifest
from rekindle.errors import ConfigError, did_you_mean
from rekindle.render import ordered, to_yaml

ALWAYS = ("namespace", "accounts", "addresses", "network")
OPTIONS = ("mlflow", "minio", "frameworks")
IMAGES = {
    "rekindle": "rekindle:0.1",
    "mlflow": "rekindle-mlflow:0.1",
    "minio": "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z",
}
CLUSTER_WIDE = ("Namespace",)
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
BUCKET = re.compile(r"[a-z0-9][-.a-z0-9]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Platform:
    """What is asked for. Raises ConfigError if it does not fit together."""

    namespace: str
    bucket: str = "rekindle"
    endpoint: str = ""  # empty: AWS, or the MinIO of `options`
    region: str = ""
    mlflow: str = ""  # empty: the MLflow of `options`
    options: tuple[str, ...] = ()
    iam: bool = False  # pods have a cloud role instead of the Secret
    quota: tuple[str, str] | None = None  # CPU and memory that the namespace may request
    ephemeral: bool = False  # MLflow and MinIO keep their data in their pods
    images: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, pattern, rule in (
            ("namespace", self.namespace, NAMESPACE, "lower-case letters, digits and dashes, at most 63"),
            ("bucket", self.bucket, BUCKET, "3 to 63 lower-case letters, digits, dashes and dots"),
        ):
            if not pattern.fullmatch(value):
                raise ConfigError(f'the {name} is "{value}": it must be {rule}.')
        for name, url in (("endpoint", self.endpoint), ("MLflow", self.mlflow)):
            parts = urlsplit(url)
            if "@" in url:
                raise ConfigError(f"the address of {name} holds a user or password: put them into a Secret.")
            if url and (parts.scheme not in ("http", "https") or not parts.netloc):
                raise ConfigError(f'the address of {name} is "{url}": it must be http(s)://HOST[:PORT].')
            if url and name == "endpoint" and parts.path.strip("/"):
                raise ConfigError(f'the endpoint is "{url}": a path is not possible, the bucket is given by itself.')
        for name in self.images:
            if name not in IMAGES:
                raise ConfigError(f'there is no image "{name}" here.{did_you_mean(name, set(IMAGES))}')
        if self.endpoint and "minio" in self.options:
            raise ConfigError(f"the endpoint is {self.endpoint}, and a MinIO is asked for: choose one of the two.")
        if self.mlflow and "mlflow" in self.options:
            raise ConfigError(f"MLflow is at {self.mlflow}, and another is asked for: choose one of the two.")
        if not self.mlflow and "mlflow" not in self.options:
            raise ConfigError("there is no MLflow: give its address (--mlflow URL), or ask for one (--with mlflow).")
        if self.iam and "minio" in self.options:
            raise ConfigError("MinIO knows no cloud roles: take out --iam, and make its Secret.")

    @property
    def values(self) -> dict[str, str]:
        """What the placeholders stand for."""
        endpoint = f"http://minio.{self.namespace}.svc:9000" if "minio" in self.options else self.endpoint
        images = {**IMAGES, **self.images}
        cpu, memory = self.quota or ("", "")
        return {
            "namespace": self.namespace,
            "bucket": self.bucket,
            "endpoint": endpoint,
            "region": self.region,
            "mlflow": self.mlflow or f"http://mlflow.{self.namespace}.svc:5000",
            "repository": yaml.safe_dump({"s3": _repository(self, endpoint)}, sort_keys=False),
            "image": images["rekindle"],
            "mlflow_image": images["mlflow"],
            "minio_image": images["minio"],
            "cpu": cpu,
            "memory": memory,
        }


def render(platform: Platform) -> list[Manifest]:
    """Every object, in the order in which they are to be applied."""
    names = [*ALWAYS, *(["quota"] if platform.quota else []), *(n for n in OPTIONS if n in platform.options)]
    found = [each for name in names for each in _objects(name, platform.values, platform.namespace)]
    for each in found if platform.iam else []:
        _take_out_secret(each)
    return [each for one in found for each in _ephemeral(one)] if platform.ephemeral else found


def operator(namespace: str = "kubeflow") -> list[Manifest]:
    """What the training operator lacks, for the namespace that it runs in; see the file for how it is applied."""
    return list(_objects("operator", {}, namespace))


def text(objects: list[Manifest]) -> str:
    return "---\n".join(map(to_yaml, objects))


def secret(namespace: str) -> str:
    """How the Secret is made, without its values showing up in a process list or a shell's history."""
    name = f"kubectl -n {namespace} create secret generic {SECRET} --from-env-file=FILE"
    return f"{name}    # FILE: the lines AWS_ACCESS_KEY_ID=... and AWS_SECRET_ACCESS_KEY=..."


def rules(name: str = "accounts") -> Iterator[tuple[str, str, str]]:
    """(API group, resource, verb) of everything that a file of configs/platform grants."""
    for each in _objects(name, {"namespace": "any"}, "any"):
        for rule in each.get("rules", []):
            for group in rule["apiGroups"]:
                yield from ((group, resource, verb) for resource in rule["resources"] for verb in rule["verbs"])


def _objects(name: str, values: dict[str, str], namespace: str) -> Iterator[Manifest]:
    file = project.file(f"configs/platform/{name}.yaml")
    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): run rekindle from a checkout.") from error
    for document in documents:
        found = ordered(_filled(document, values))
        if found["kind"] == "ConfigMap":
            found["data"] = {key: value for key, value in found["data"].items() if value}
        if found["kind"] not in CLUSTER_WIDE:
            found["metadata"]["namespace"] = namespace
        yield found


def _filled(value: Any, values: dict[str, str]) -> Any:
    """Text by text, after parsing: a value can become nothing but text."""
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    return Template(value).substitute(values) if isinstance(value, str) else value


def _repository(platform: Platform, endpoint: str) -> dict[str, Any]:
    """Argo's own settings for the bucket."""
    parts = urlsplit(endpoint or f"https://s3.{platform.region + '.' if platform.region else ''}amazonaws.com")
    found: dict[str, Any] = {"bucket": platform.bucket, "endpoint": parts.netloc}
    if parts.scheme == "http":
        found["insecure"] = True
    if platform.region:
        found["region"] = platform.region
    if platform.iam:
        return found | {"useSDKCreds": True}
    keys = {"accessKeySecret": "AWS_ACCESS_KEY_ID", "secretKeySecret": "AWS_SECRET_ACCESS_KEY"}
    return found | {field: {"name": SECRET, "key": key} for field, key in keys.items()}


def _take_out_secret(found: Manifest) -> None:
    """Nobody makes it where pods have a cloud role."""
    for container in found.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        container["envFrom"] = [e for e in container["envFrom"] if e.get("secretRef", {}).get("name") != SECRET]


def _ephemeral(found: Manifest) -> Iterator[Manifest]:
    """Without claims: an empty directory in the place of each volume."""
    if found["kind"] == "PersistentVolumeClaim":
        return
    for volume in found.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
        if volume.pop("persistentVolumeClaim", None):
            volume["emptyDir"] = {}
    yield found
