"""Check that the API server would accept the containers of a template's pod, and that this machine
can run them.

    check(template, where, cluster)           # before the run; raises ConfigError
    check_images(template, where, cluster)    # when the pod starts and parameters have values
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

from argolocal.common import object_names
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.language.quantity import parse_quantity
from argolocal.manifest.resolve import all_templates
from argolocal.manifest.types import Data
from argolocal.pods.container_images import BASE_IMAGES, IMAGES_FILE, base_name
from argolocal.pods.kinds import container_set, sidecars


def containers_of(template: Data) -> Iterator[tuple[str, Data]]:
    """Yield (path in the template, container) for each container of a template."""
    for kind in ("container", "script"):
        if template.get(kind) is not None:
            yield kind, template[kind]
    lists = {kind: template.get(kind) for kind in sidecars.KINDS}
    if template.get("containerSet"):
        lists["containerSet.containers"] = container_set.members(template)
    for kind, containers in lists.items():
        yield from (
            (f"{kind}[{index}]", container) for index, container in enumerate(containers or [])
        )


def port_number(container: Data, port: int | str) -> int:
    """Return the number of a port, or of the containerPort with this name. Raises ValueError."""
    numbers = {entry.get("name"): entry["containerPort"] for entry in container.get("ports") or []}
    return int(numbers.get(port, port))


def check(template: Data, where: str, cluster: Cluster) -> None:
    """Raise ConfigError for a container that has no image or command, or that Kubernetes
    rejects."""
    for path, container in containers_of(template):
        _check_program(container, f"{where}.{path}", cluster)
        _check_environment(container, f"{where}.{path}.env")
        _check_mounts(container, f"{where}.{path}.volumeMounts")
        _check_resources(container, f"{where}.{path}.resources")


def check_names(template: Data, pod: str) -> None:
    """Raise ConfigError for a name in a pod that the API server rejects. Names are checked when the
    pod starts, because earlier they may contain tags."""
    where = f'Pod "{pod}" is invalid'
    for path, container in containers_of(template):
        if "name" in container:
            object_names.LABEL.check(container["name"], f"{where}: {path}.name")

    metadata = template.get("metadata") or {}
    object_names.check_labels(metadata.get("labels"), f"{where}: metadata.labels")
    object_names.check_annotations(metadata.get("annotations"), f"{where}: metadata.annotations")
    object_names.check_labels(template.get("nodeSelector"), f"{where}: spec.nodeSelector")

    for field in ("serviceAccountName", "priorityClassName", "schedulerName"):
        if template.get(field):
            object_names.SUBDOMAIN.check(template[field], f"{where}: spec.{field}")

    for alias in template.get("hostAliases") or []:
        for name in (alias.get("hostnames") or []) if isinstance(alias, dict) else []:
            object_names.SUBDOMAIN.check(name, f"{where}: spec.hostAliases.hostnames")


def check_images(template: Data, where: str, cluster: Cluster) -> None:
    """Raise ConfigError for an image whose programs do not exist on this machine."""
    for path, container in containers_of(template):
        image = str(container.get("image"))
        words = [*(container.get("command") or []), *(container.get("args") or [])]

        runs_module = words[1:2] == ["-m"] and {*words[2:3]} <= {*cluster.modules}
        if (
            "{{" in image
            or base_name(image) in BASE_IMAGES
            or runs_module
            or image in cluster.images
        ):
            continue

        supported_images = [
            *BASE_IMAGES,
            *(f"images for python -m {module}" for module in cluster.modules),
        ]
        raise ConfigError(
            f"{where}.{path}.image is {image!r}, which this machine does not have: only "
            f"{', '.join(supported_images)} are supported. Use one of these, map "
            f"it to a command in {cluster.home / IMAGES_FILE} "
            f"({image}: {{command: [...]}}), or submit the workflow to a cluster."
        )


def python_version_warnings(spec: dict[str, Any], cluster: Cluster) -> Iterator[str]:
    """Yield a warning for each image `python:X.Y` of a workflow whose Python version differs from
    the one used here."""
    local_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    users: dict[str, list[str]] = {}

    for template, _ in all_templates(spec, "spec"):
        for _, container in containers_of(template):
            users.setdefault(str(container.get("image")), []).append(str(template.get("name")))

    for image, names in users.items():
        version = re.search(r":(\d+\.\d+)", image)
        if (
            base_name(image) == "python"
            and version
            and version[1] != local_version
            and image not in cluster.images
        ):
            yield (
                f"{', '.join(dict.fromkeys(names))}: {image} runs here on Python {local_version},"
                f" not {version[1]}: code for {version[1]} may fail. Set the image's interpreter in"
                f" {cluster.home / IMAGES_FILE} ({image}: {{python: /path/to/python}})."
            )


def _check_program(container: Data, where: str, cluster: Cluster) -> None:
    image = container.get("image")
    if not image:
        raise ConfigError(f"{where}.image is missing: set it.")
    image_spec = cluster.image(image)
    if not (container.get("command") or image_spec.command or image_spec.args):
        raise ConfigError(
            f"{where}.command is missing, and the default command of {image} is not known here."
            " Add it."
        )


def _check_environment(container: Data, where: str) -> None:
    for index, variable in enumerate(container.get("env") or []):
        if variable.get("value") and variable.get("valueFrom"):
            raise ConfigError(
                f"{where}[{index}] has both value and valueFrom: Kubernetes accepts only one of"
                " them."
            )


def _check_mounts(container: Data, where: str) -> None:
    index_of_path: dict[str, int] = {}
    for index, mount in enumerate(container.get("volumeMounts") or []):
        first_index = index_of_path.setdefault(path := mount["mountPath"], index)
        if first_index != index:
            raise ConfigError(
                f"{where}[{index}].mountPath is {path!r}, which is also the path of"
                f" {where}[{first_index}]. Choose another path."
            )


def _check_resources(container: Data, where: str) -> None:
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for name, request in (resources.get("requests") or {}).items():
        if name in limits and parse_quantity(request) > parse_quantity(limits[name]):
            raise ConfigError(
                f"{where}.requests.{name} is {request}: it must be at most limits.{name}"
                f" ({limits[name]}), or Kubernetes rejects the pod. Raise the limit, or lower the"
                " request."
            )
