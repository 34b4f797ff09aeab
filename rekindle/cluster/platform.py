"""Render the objects of configs/platform, which a namespace needs before pipelines can run in it.

The objects contain no credentials, only the name of a Secret; `format_secret_command` returns the
command that creates it.
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
from rekindle.blocks.manifest.render import sort_keys_for_reading, to_yaml
from rekindle.blocks.pod_settings import Manifest
from rekindle.errors import ConfigError, format_address, suggest_similar
from rekindle.kubernetes_names import (
    AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY,
    NAME_LABEL,
    STORE_SECRET,
)

REQUIRED_FILES = ("namespace", "accounts", "users", "addresses", "network")
COMPONENTS = ("mlflow", "minio", "frameworks", "signals", "prometheus", "retraining")
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
    """The settings of a namespace for pipelines. Raises ConfigError if the settings are invalid or
    conflict."""

    namespace: str
    bucket: str = "rekindle"
    # address of the object store; if empty, AWS or the MinIO in `components`
    endpoint: str = ""
    region: str = ""
    # address of MLflow; if empty, the MLflow in `components`
    mlflow: str = ""
    components: tuple[str, ...] = ()
    # True if pods use a cloud (IAM) role instead of the Secret with the keys of the object store
    iam: bool = False
    # quota of the namespace: total CPU and memory requests
    quota: tuple[str, str] | None = None
    # True: True if MLflow and MinIO keep their data only as long as their pods exist
    ephemeral: bool = False
    images: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, setting_value, setting_pattern, setting_rule in (
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
            if not setting_pattern.fullmatch(setting_value):
                raise ConfigError(f'the {name} is "{setting_value}": it must be {setting_rule}.')

        for name, url in (("endpoint", self.endpoint), ("MLflow", self.mlflow)):
            url_parts = urlsplit(url)
            if format_address(url) != url:
                raise ConfigError(
                    f"the address of {name} contains a user, a password or a query: put them into a"
                    " Secret."
                )

            if url and (url_parts.scheme not in ("http", "https") or not url_parts.netloc):
                raise ConfigError(
                    f'the address of {name} is "{url}": it must be http(s)://HOST[:PORT].'
                )

            if url and name == "endpoint" and url_parts.path.strip("/"):
                raise ConfigError(
                    f'the endpoint is "{url}": it must not have a path; --bucket names the bucket.'
                )

        for name in self.images:
            if name not in IMAGES:
                raise ConfigError(
                    f'--image: "{name}" must be one of'
                    f" {', '.join(IMAGES)}.{suggest_similar(name, set(IMAGES))}"
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
        """The values of the placeholders in the files of configs/platform."""
        if "minio" in self.components:
            store_endpoint = f"http://minio.{self.namespace}.svc:9000"
        else:
            store_endpoint = self.endpoint

        image_names = {**IMAGES, **self.images}
        cpu_quota, memory_quota = self.quota or ("", "")

        return {
            "namespace": self.namespace,
            "bucket": self.bucket,
            "endpoint": store_endpoint,
            "region": self.region,
            "mlflow": self.mlflow or f"http://mlflow.{self.namespace}.svc:5000",
            "repository": yaml.safe_dump(
                {"archiveLogs": True, "s3": _repository_settings(self, store_endpoint)},
                sort_keys=False,
            ),
            "image": image_names["rekindle"],
            "mlflow_image": image_names["mlflow"],
            "minio_image": image_names["minio"],
            "cpu": cpu_quota,
            "memory": memory_quota,
        }


def render_platform(platform: Platform) -> list[Manifest]:
    """Return all objects, in the order in which they must be applied."""
    file_names = [
        *REQUIRED_FILES,
        *(["quota"] if platform.quota else []),
        *(component for component in COMPONENTS if component in platform.components),
    ]

    platform_objects = [
        manifest
        for file in file_names
        for manifest in _render_file(file, platform.values, platform.namespace)
    ]

    (serving_policies,) = (
        platform_object
        for platform_object in platform_objects
        if (platform_object["kind"], platform_object["metadata"]["name"])
        == ("NetworkPolicy", "serving")
    )
    serving_policies["spec"]["egress"] += _store_egress_rules(platform)

    if platform.iam:
        _remove_secret(platform_objects)
    if platform.ephemeral:
        return _replace_claims(platform_objects)

    return platform_objects


def render_operator_patch(namespace: str = "kubeflow") -> list[Manifest]:
    """Return the patch of the training operator in configs/platform/operator.yaml, which shows how
    to apply it."""
    return list(_render_file("operator", {}, namespace))


def to_yaml_documents(platform_objects: list[Manifest]) -> str:
    return "---\n".join(map(to_yaml, platform_objects))


def format_secret_command(
    namespace: str, secret_name: str = STORE_SECRET, key_names: Iterable[str] = KEY_NAMES
) -> str:
    """Return the command that creates a Secret from a file, so that the values do not appear in
    process lists and the shell's history."""
    file_lines = " and ".join(f"{key}=..." for key in key_names)
    kubectl_command = (
        f"kubectl -n {namespace} create secret generic {secret_name} --from-env-file=FILE"
    )
    return f"{kubectl_command}    # FILE: {file_lines}, each on its own line"


def _store_egress_rules(platform: Platform) -> list[Manifest]:
    """Return the egress rules of a NetworkPolicy for the object store.

    Rules for an object store in the cluster select its pods by labels instead of the port, since
    the port of the pods may differ from the port of the Service.
    """
    endpoint_parts = urlsplit(platform.values["endpoint"] or "https://s3.amazonaws.com")

    name, _, domain_rest = (endpoint_parts.hostname or "").partition(".")
    if domain_rest.split(".")[1:2] == ["svc"]:
        namespace_selector = {
            "matchLabels": {"kubernetes.io/metadata.name": domain_rest.partition(".")[0]}
        }
        if "minio" in platform.components:
            pod_selector = {"podSelector": {"matchLabels": {NAME_LABEL: name}}}
        else:
            pod_selector = {}

        egress_rules: list[Manifest] = [
            {"to": [{"namespaceSelector": namespace_selector, **pod_selector}]}
        ]
    else:
        egress_rules = [
            {
                "ports": [
                    {
                        "port": endpoint_parts.port
                        or (80 if endpoint_parts.scheme == "http" else 443)
                    }
                ]
            }
        ]

    # also allow the services that issue the credentials of a cloud role
    if platform.iam:
        egress_rules += [
            {"ports": [{"port": 443}]},
            {"to": [{"ipBlock": {"cidr": "169.254.0.0/16"}}]},
        ]

    return egress_rules


def list_permissions(role_name: str = "accounts") -> Iterator[tuple[str, str, str]]:
    """Yield (API group, resource, verb) of each permission that a file of configs/platform
    grants."""
    for manifest in _render_file(role_name, {"namespace": "any"}, "any"):
        for role_rule in manifest.get("rules", []):
            for api_group in role_rule["apiGroups"]:
                yield from (
                    (api_group, resource_name, verb)
                    for resource_name in role_rule["resources"]
                    for verb in role_rule["verbs"]
                )


def _render_file(
    file_name: str, placeholder_values: dict[str, str], namespace: str
) -> Iterator[Manifest]:
    file = project.REFERENCE / f"configs/platform/{file_name}.yaml"
    try:
        yaml_documents = parse(read_text(file), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}): run rekindle from a checkout."
        ) from error

    for yaml_document in yaml_documents:
        manifest = sort_keys_for_reading(_fill_in_placeholders(yaml_document, placeholder_values))
        if manifest["kind"] == "ConfigMap":
            manifest["data"] = {
                key: data_value for key, data_value in manifest["data"].items() if data_value
            }
        if manifest["kind"] not in CLUSTER_WIDE_KINDS:
            manifest["metadata"]["namespace"] = namespace

        yield manifest


def _fill_in_placeholders(yaml_node: object, placeholder_values: dict[str, str]) -> Any:
    """Return the parsed YAML with its placeholders replaced. Placeholders are replaced after
    parsing, so that a value cannot change the structure of the YAML."""
    if isinstance(yaml_node, dict):
        return {
            key: _fill_in_placeholders(child_node, placeholder_values)
            for key, child_node in yaml_node.items()
        }
    if isinstance(yaml_node, list):
        return [_fill_in_placeholders(list_item, placeholder_values) for list_item in yaml_node]
    if isinstance(yaml_node, str):
        return Template(yaml_node).substitute(placeholder_values)
    return yaml_node


def _repository_settings(platform: Platform, store_endpoint: str) -> dict[str, Any]:
    """Return the configuration of the bucket as Argo's artifact repository."""
    endpoint_parts = urlsplit(
        store_endpoint
        or f"https://s3.{platform.region + '.' if platform.region else ''}amazonaws.com"
    )
    s3_settings: dict[str, Any] = {"bucket": platform.bucket, "endpoint": endpoint_parts.netloc}

    if endpoint_parts.scheme == "http":
        s3_settings["insecure"] = True
    if platform.region:
        s3_settings["region"] = platform.region
    if platform.iam:
        return s3_settings | {"useSDKCreds": True}

    secret_keys = {"accessKeySecret": AWS_ACCESS_KEY_ID, "secretKeySecret": AWS_SECRET_ACCESS_KEY}
    return s3_settings | {
        secret_field: {"name": STORE_SECRET, "key": key}
        for secret_field, key in secret_keys.items()
    }


def _remove_secret(platform_objects: list[Manifest]) -> None:
    """Remove references to the Secret with the keys of the object store, which does not exist if
    pods use a cloud role."""
    for pod_spec in _iterate_pod_specs(platform_objects):
        for container in pod_spec["containers"]:
            container["envFrom"] = [
                environment_source
                for environment_source in container["envFrom"]
                if environment_source.get("secretRef", {}).get("name") != STORE_SECRET
            ]


def _replace_claims(platform_objects: list[Manifest]) -> list[Manifest]:
    """Replace PersistentVolumeClaims by `emptyDir` volumes, whose data is lost with the pod."""
    for pod_spec in _iterate_pod_specs(platform_objects):
        for volume in pod_spec.get("volumes", []):
            if volume.pop("persistentVolumeClaim", None):
                volume["emptyDir"] = {}
    return [
        manifest for manifest in platform_objects if manifest["kind"] != "PersistentVolumeClaim"
    ]


def _iterate_pod_specs(platform_objects: list[Manifest]) -> Iterator[Manifest]:
    yield from (
        platform_object["spec"]["template"]["spec"]
        for platform_object in platform_objects
        if platform_object["kind"] in ("Deployment", "Job")
    )
