"""The prices of nodes, from `prices.yaml` in the root of a project. Without prices.yaml, the cost
of runs is unknown.

    prices = Prices.load(project.root())   # None without the file
    pod = read_template_pod(template)
    prices.compute_pod_cost(pod, seconds)  # the pod's node selection determines class and spot

Rendering stores the prices of a run in the annotation PRICES_ANNOTATION of the manifest in the
workflow parameter `manifest`. Because of this annotation, pods can read the prices, and a change of
prices does not change any cache key or manifest hash.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import Field

from argolocal.language.yaml_text import parse_one, read_text
from rekindle.errors import ConfigError, suggest_similar
from rekindle.sections import Section, parse_section
from rekindle.training.cost.pod_requests import PodRequests

PRICES_FILE = "prices.yaml"
PRICES_ANNOTATION = "rekindle.dev/prices"
HOUR_S = 3600.0


class HourlyRate(Section):
    """Hourly prices of the resources of a node."""

    cpu_hour: float = Field(ge=0, description="price of a requested CPU for an hour")
    gib_hour: float = Field(ge=0, description="price of a requested GiB of memory for an hour")
    gpu_hour: float = Field(
        0.0, ge=0, description="price of a requested GPU, or part of a GPU, for an hour"
    )


class PodSelector(Section):
    """Conditions on the node selection of a pod. A pod matches the selector if all conditions
    hold."""

    labels: dict[str, str] = Field(
        default_factory=dict,
        description="labels that the pod requires of its node (nodeSelector or affinity)",
    )
    tolerations: dict[str, str] = Field(
        default_factory=dict,
        description='values by key of taints that the pod tolerates ("" for operator Exists)',
    )
    resource: str = Field("", description="device that the pod requests, such as nvidia.com/gpu")

    def conditions(self) -> set[tuple[str, str, str]]:
        """Return the conditions as a set, for comparison with other selectors."""
        selector_conditions = {("label", *label_pair) for label_pair in self.labels.items()}
        selector_conditions.update(
            {("toleration", *label_pair) for label_pair in self.tolerations.items()}
        )
        return selector_conditions | ({("resource", self.resource, "")} if self.resource else set())

    def matches(self, pod: PodRequests) -> bool:
        """Return True if all conditions hold for a pod."""
        return (
            self.labels.items() <= pod.labels.items()
            and self.tolerations.items() <= {*pod.tolerations}
            and self.resource in ("", *pod.devices)
        )


class NodeClass(Section):
    """Nodes with the same prices."""

    selector: PodSelector | None = Field(None, description="pods that run on nodes of this class")
    on_demand: HourlyRate = Field(description="prices on demand")
    spot: HourlyRate | None = Field(
        None, description="prices of spot nodes (empty: nodes of this class are never spot nodes)"
    )


class Prices(Section):
    """The prices of a project."""

    currency: str = Field(
        pattern=r"^[A-Z]{3}$", description="currency of all prices (ISO 4217), such as USD"
    )
    default: str = Field(description="class of the pods that no selector matches")
    spot: list[PodSelector] = Field(
        default_factory=list, description="selectors of the pods that run on spot nodes"
    )
    classes: dict[str, NodeClass] = Field(description="classes of nodes by name")

    @classmethod
    def load(cls, root: Path) -> Self | None:
        """Read the prices of the project in `root`; None if the project does not have the file
        prices.yaml. Raises ConfigError."""
        prices_path = root / PRICES_FILE
        if not prices_path.is_file():
            return None
        try:
            prices_content = parse_one(read_text(prices_path), str(prices_path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{prices_path} cannot be read ({error}): give a YAML file, or remove it."
            ) from error
        return cls.parse(prices_content, str(prices_path))

    @classmethod
    def parse(cls, prices_content: object, origin: str) -> Self:
        """Validate the content of prices.yaml. Raises ConfigError that names `origin` and the
        key."""
        if not isinstance(prices_content, Mapping):
            raise ConfigError(
                f"{origin} must be a mapping of keys: `rekindle init` creates a project with an"
                " example of the file."
            )

        try:
            prices = parse_section(cls, prices_content, "")
            prices._validate()
        except ConfigError as error:
            raise ConfigError(*(f"{origin}: {line}" for line in error.lines)) from error

        return prices

    def _validate(self) -> None:
        if self.default not in self.classes:
            hint = (
                suggest_similar(self.default, set(self.classes))
                or f" Classes: {', '.join(self.classes) or 'none'}."
            )
            raise ConfigError(f'default is "{self.default}": it must be the name of a class.{hint}')

        selectors_by_key = {
            f"classes.{class_name}.selector": node_class.selector
            for class_name, node_class in self.classes.items()
        }
        selectors_by_key.update(
            {
                f"spot.{selector_index}": selector
                for selector_index, selector in enumerate(self.spot)
            }
        )

        for selector_key, selector in selectors_by_key.items():
            if selector is None and selector_key != f"classes.{self.default}.selector":
                raise ConfigError(
                    f"{selector_key} is missing: no pod would run on nodes of this class, which is"
                    " not the default."
                )

            if selector and not selector.conditions():
                raise ConfigError(
                    f"{selector_key} is empty, and would match every pod: give it labels,"
                    " tolerations or resource."
                )

        conditions_by_class = {
            class_name: node_class.selector.conditions()
            for class_name, node_class in self.classes.items()
            if node_class.selector
        }
        for class_name, conditions in conditions_by_class.items():
            for other_class, other_conditions in conditions_by_class.items():
                if class_name != other_class and conditions <= other_conditions:
                    raise ConfigError(
                        f"classes.{class_name}.selector matches every pod of class {other_class},"
                        " too: a pod must have one class. Add a condition to the selector of"
                        f" {class_name} that {other_class} does not fulfil."
                    )

    def check_pods(self, pods: Iterable[PodRequests]) -> None:
        """Raise ConfigError unless exactly one node class matches each pod, and each pod has a
        price."""
        for pod in pods:
            self.compute_pod_cost(pod, 0.0)

    def classify(self, pod: PodRequests) -> str:
        """Return the name of the node class of a pod. Raises ConfigError if two node classes match
        the pod."""
        class_names = [
            class_name
            for class_name, node_class in self.classes.items()
            if node_class.selector and node_class.selector.matches(pod)
        ]
        if len(class_names) > 1:
            raise ConfigError(
                f"{PRICES_FILE}: the classes {' and '.join(class_names)} both match {pod}: a pod"
                " must have one class. Add a condition to one of their selectors."
            )

        if class_names:
            return class_names[0]

        return self.default

    def is_spot(self, pod: PodRequests) -> bool:
        """Return True if a pod runs on spot nodes."""
        return any(selector.matches(pod) for selector in self.spot)

    def compute_resource_cost(
        self,
        class_name: str,
        is_spot: bool,
        cpu_seconds: float,
        gib_seconds: float,
        gpu_seconds: float = 0.0,
    ) -> float:
        """Return the cost of resources on nodes of the class `class_name`. Raises ConfigError if
        the class has no spot price."""
        node_class = self.classes[class_name]
        hourly_rate = node_class.spot if is_spot else node_class.on_demand
        if hourly_rate is None:
            raise ConfigError(
                f"{PRICES_FILE}: classes.{class_name}.spot is missing, but a pod runs on spot"
                " nodes of this class. Add the prices."
            )
        return (
            cpu_seconds * hourly_rate.cpu_hour
            + gib_seconds * hourly_rate.gib_hour
            + gpu_seconds * hourly_rate.gpu_hour
        ) / HOUR_S

    def compute_pod_cost(
        self, pod: PodRequests, duration_seconds: float, runs_on_spot: bool | None = None
    ) -> float:
        """Return the cost of a pod that runs for `duration_seconds`. `runs_on_spot` is True if the
        pod runs on spot nodes (None: derive this from the pod's node selection)."""
        is_spot = self.is_spot(pod) if runs_on_spot is None else runs_on_spot
        cpu_seconds, gib_seconds, _ = pod.compute_resource_seconds(duration_seconds)
        return self.compute_resource_cost(
            self.classify(pod),
            is_spot,
            cpu_seconds,
            gib_seconds,
            self.count_gpus(pod) * duration_seconds,
        )

    def count_gpus(self, pod: PodRequests) -> float:
        """Return the number of GPUs of a pod. If the pod requests no known GPU resource, count the
        devices named in the selector of its node class.

        Raises ConfigError if two node classes match.
        """
        selector = self.classes[self.classify(pod)].selector
        return pod.gpus or pod.devices.get(selector.resource if selector else "", 0.0)
