"""The containers of a template's pod, and what of one neither an API server nor this machine takes.

check(template, where, cluster)     # before the run; raises ConfigError
known(template, where, cluster)     # as the pod starts, when its tags have values
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.argo.language.quantity import quantity
from rekindle.errors import ConfigError
from rekindle.local.container_images import BASES, base_name
from rekindle.local.pods.kinds import container_set, sidecars

Container = Mapping[str, Any]


def of(template: Mapping[str, Any]) -> Iterator[tuple[str, Container]]:
    """All of them, each with its path in the template."""
    for kind in ("container", "script"):
        if template.get(kind) is not None:
            yield kind, template[kind]
    lists = {kind: template.get(kind) for kind in sidecars.KINDS}
    if template.get("containerSet"):
        lists["containerSet.containers"] = container_set.members(template)
    for kind, several in lists.items():
        yield from ((f"{kind}[{index}]", each) for index, each in enumerate(several or []))


def check(template: Mapping[str, Any], where: str, cluster: Any) -> None:
    """Raises ConfigError for an image that is not known here, and for what makes a pod invalid."""
    for path, each in of(template):
        _program(each, f"{where}.{path}", cluster)
        _environment(each, f"{where}.{path}.env")
        _mounts(each, f"{where}.{path}.volumeMounts")
        _resources(each, f"{where}.{path}.resources")


def known(template: Mapping[str, Any], where: str, cluster: Any) -> None:
    """Raises ConfigError for an image that is not known here: without containers it is a program of this machine."""
    for path, each in of(template):
        image, words = str(each.get("image")), [*(each.get("command") or []), *(each.get("args") or [])]
        if "{{" in image or base_name(image) in BASES or words[1:3] == ["-m", "rekindle"] or image in cluster.images:
            continue
        raise ConfigError(
            f"{where}.{path}.image is {image!r}, and what it holds is not known on this machine: only "
            f"{', '.join(BASES)} are, and images of this repository (they run python -m rekindle). Use one of "
            f"these, say what it is here in {cluster.home / 'images.yaml'} ({image}: {{command: [...]}}), "
            "or submit to a cluster."
        )


def _program(container: Container, where: str, cluster: Any) -> None:
    if not (image := container.get("image")):
        raise ConfigError(f"{where}.image is missing: give it.")
    own = cluster.image(image)
    if not (container.get("command") or own.command or own.args):
        raise ConfigError(f"{where}.command is missing, and what {image} runs is not known here. Give it.")


def _environment(container: Container, where: str) -> None:
    for index, each in enumerate(container.get("env") or []):
        if each.get("value") and each.get("valueFrom"):
            raise ConfigError(
                f"{where}[{index}] has both a value and valueFrom, and Kubernetes refuses that: give one."
            )


def _mounts(container: Container, where: str) -> None:
    first: dict[str, int] = {}
    for index, each in enumerate(container.get("volumeMounts") or []):
        if (other := first.setdefault(path := each["mountPath"], index)) != index:
            raise ConfigError(f"{where}[{index}].mountPath is {path!r}, as that of {where}[{other}]. Give it its own.")


def _resources(container: Container, where: str) -> None:
    given = container.get("resources") or {}
    most = given.get("limits") or {}
    for name, asked in (given.get("requests") or {}).items():
        if name in most and quantity(asked) > quantity(most[name]):
            raise ConfigError(
                f"{where}.requests.{name} is {asked}: it must be at most limits.{name} ({most[name]}), "
                "or Kubernetes refuses the pod. Raise the limit, or ask for less."
            )
