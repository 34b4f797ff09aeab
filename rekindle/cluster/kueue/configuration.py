"""Kueue's configuration: the kinds of jobs that it manages, and the resources that it ignores.

Source: the fields are defined by Kueue 0.19 in apis/config/v1beta2 (configuration_types.go,
defaults.go), and the ConfigMap in Kueue's Helm chart and manifests.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from argolocal.language.yaml_text import parse_one
from argolocal.manifest.types import Object
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster, Resource
from rekindle.cluster.objects.types import KueueConfiguration
from rekindle.documents import validate_value
from rekindle.errors import ConfigError

KUEUE_NAMESPACE = "kueue-system"
CONFIG_MAP_NAME = "kueue-manager-config"
CONFIG_KEY = "controller_manager_config.yaml"
CONFIG_MAPS = Resource("v1", "configmaps")
# Kueue's names of the kinds of jobs
FRAMEWORKS = {
    "Job": "batch/job",
    "Pod": "pod",
    "Deployment": "deployment",
    "StatefulSet": "statefulset",
    "JobSet": "jobset.x-k8s.io/jobset",
    "TrainJob": "trainer.kubeflow.org/trainjob",
    **{
        kind: f"kubeflow.org/{kind.lower()}"
        for kind in ("PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob")
    },
    "RayJob": "ray.io/rayjob",
    "RayCluster": "ray.io/raycluster",
}
DEFAULT_FRAMEWORKS = ("batch/job",)
DEFAULT_READY_TIMEOUT = "30m"


class UnreadableConfiguration(Exception):
    """Kueue's configuration cannot be read; the text of the error is the reason."""


@dataclass(frozen=True)
class Configuration:
    """The part of Kueue's configuration that decides about the admission of jobs."""

    document: Object

    def has_framework(self, job_kind: str) -> bool:
        """Return whether Kueue manages jobs of a kind; True for a kind that Kueue may not know."""
        frameworks = (self.document.get("integrations") or {}).get("frameworks")
        return FRAMEWORKS.get(job_kind) in (None, *(frameworks or DEFAULT_FRAMEWORKS))

    def ignores_resource(self, resource_name: str) -> bool:
        """Return True if Kueue does not compare a resource with the quota of the same name."""
        settings = self.document.get("resources") or {}
        excluded_prefixes = tuple(settings.get("excludeResourcePrefixes") or ())
        replaced_names = [rule.get("input") for rule in settings.get("transformations") or ()]
        return resource_name.startswith(excluded_prefixes) or resource_name in replaced_names

    @property
    def namespace_selector(self) -> Object | None:
        """The selector of the namespaces whose pods Kueue manages; None if it is the default."""
        return self.document.get("managedJobsNamespaceSelector")

    @property
    def ready_timeout(self) -> str:
        """The time that the pods of a job have to become ready, or Kueue evicts the job; "" if
        unlimited."""
        settings = self.document.get("waitForPodsReady")
        if settings is None:
            # Kueue 0.19, with the configuration v1beta2, waits by default
            is_default = self.document.get("apiVersion", "").endswith("/v1beta2")
            return DEFAULT_READY_TIMEOUT if is_default else ""
        if not settings.get("enable", True):
            return ""
        return settings.get("timeout") or DEFAULT_READY_TIMEOUT


def read_configuration(cluster: Cluster) -> Configuration:
    """Read Kueue's ConfigMap. Raises UnreadableConfiguration."""
    source = f"the ConfigMap {CONFIG_MAP_NAME} in namespace {KUEUE_NAMESPACE}"
    try:
        config_map = cluster.in_namespace(KUEUE_NAMESPACE).find(CONFIG_MAPS, CONFIG_MAP_NAME)
    except ApiError as error:
        raise UnreadableConfiguration(f"{source} cannot be read ({error})") from error
    if config_map is None:
        raise UnreadableConfiguration(f"{source} does not exist")

    configuration_text = (config_map.get("data") or {}).get(CONFIG_KEY, "")
    try:
        document = parse_one(configuration_text, source)
        if not isinstance(document, Mapping):
            raise UnreadableConfiguration(f"{source} lacks the document {CONFIG_KEY}")
        validate_value(KueueConfiguration, document)
    except (ConfigError, ValueError) as error:
        raise UnreadableConfiguration(f"{source} is malformed ({error})") from error
    return Configuration(dict(document))
