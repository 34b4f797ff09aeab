"""Check that the API server would accept the containers of a template's pod, and that this machine
can run them.

    check_containers(template, field_path, cluster)    # before the run; raises ConfigError
    check_images(template, field_path, cluster)    # when the pod starts and parameters have values
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

from argolocal.common import object_names
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.language.quantity import parse_quantity
from argolocal.manifest.resolve import list_templates
from argolocal.manifest.types import Data
from argolocal.pods.container_images import BASE_IMAGES, IMAGES_FILE_NAME, image_base_name
from argolocal.pods.kinds import container_set, sidecars


def list_containers(template: Data) -> Iterator[tuple[str, Data]]:
    """Yield (path in the template, container) for each container of a template."""
    for container_field in ("container", "script"):
        if template.get(container_field) is not None:
            yield container_field, template[container_field]
    containers_by_field = {
        container_field: template.get(container_field)
        for container_field in sidecars.CONTAINER_LIST_FIELDS
    }
    if template.get("containerSet"):
        containers_by_field["containerSet.containers"] = container_set.list_containers(template)
    for container_field, containers in containers_by_field.items():
        yield from (
            (f"{container_field}[{index}]", container)
            for index, container in enumerate(containers or [])
        )


def find_port_number(container: Data, port: int | str) -> int:
    """Return the number of `port`, which is a number or the name of a containerPort. Raises
    ValueError."""
    port_numbers = {
        container_port.get("name"): container_port["containerPort"]
        for container_port in container.get("ports") or []
    }
    return int(port_numbers.get(port, port))


def check_containers(template: Data, field_path: str, cluster: Cluster) -> None:
    """Raise ConfigError for a container that has no image or command, or that Kubernetes
    rejects."""
    for container_path, container in list_containers(template):
        _check_program(container, f"{field_path}.{container_path}", cluster)
        _check_environment(container, f"{field_path}.{container_path}.env")
        _check_mounts(container, f"{field_path}.{container_path}.volumeMounts")
        _check_resources(container, f"{field_path}.{container_path}.resources")


def check_pod_names(template: Data, pod_name: str) -> None:
    """Raise ConfigError for a name in a pod that the API server would reject. Call this function
    when the pod starts, because the names may contain tags before the start."""
    message_prefix = f'Pod "{pod_name}" is invalid'
    for container_path, container in list_containers(template):
        if "name" in container:
            object_names.LABEL_RULE.check(
                container["name"], f"{message_prefix}: {container_path}.name"
            )

    metadata = template.get("metadata") or {}
    object_names.check_labels(metadata.get("labels"), f"{message_prefix}: metadata.labels")
    object_names.check_annotations(
        metadata.get("annotations"), f"{message_prefix}: metadata.annotations"
    )
    object_names.check_labels(template.get("nodeSelector"), f"{message_prefix}: spec.nodeSelector")

    for field in ("serviceAccountName", "priorityClassName", "schedulerName"):
        if template.get(field):
            object_names.SUBDOMAIN_RULE.check(template[field], f"{message_prefix}: spec.{field}")

    for host_alias in template.get("hostAliases") or []:
        if not isinstance(host_alias, dict):
            continue

        for host_name in host_alias.get("hostnames") or []:
            object_names.SUBDOMAIN_RULE.check(
                host_name, f"{message_prefix}: spec.hostAliases.hostnames"
            )


def check_images(template: Data, field_path: str, cluster: Cluster) -> None:
    """Raise ConfigError for an image that this machine does not support. An image is supported if
    it is in BASE_IMAGES or images.yaml, or if its command is `python -m` with a module of the
    cluster."""
    for container_path, container in list_containers(template):
        image = str(container.get("image"))
        command_words = [*(container.get("command") or []), *(container.get("args") or [])]

        runs_module = command_words[1:2] == ["-m"] and {*command_words[2:3]} <= {*cluster.modules}
        if (
            "{{" in image
            or image_base_name(image) in BASE_IMAGES
            or runs_module
            or image in cluster.images
        ):
            continue

        supported_images = [
            *BASE_IMAGES,
            *(f"images for python -m {module_name}" for module_name in cluster.modules),
        ]
        raise ConfigError(
            f"{field_path}.{container_path}.image is {image!r}, which this machine does not have:"
            f" only {', '.join(supported_images)} are supported. Use one of these, map it to a"
            f" command in {cluster.home / IMAGES_FILE_NAME} ({image}: {{command: [...]}}), or"
            " submit the workflow to a cluster."
        )


def python_version_warnings(spec: dict[str, Any], cluster: Cluster) -> Iterator[str]:
    """Yield a warning for each image `python:X.Y` of a workflow if this program runs on another
    version of Python."""
    local_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    templates_by_image: dict[str, list[str]] = {}

    for template, _ in list_templates(spec, "spec"):
        for _, container in list_containers(template):
            templates_by_image.setdefault(str(container.get("image")), []).append(
                str(template.get("name"))
            )

    for image, template_names in templates_by_image.items():
        image_version = re.search(r":(\d+\.\d+)", image)
        if (
            image_base_name(image) == "python"
            and image_version
            and image_version[1] != local_version
            and image not in cluster.images
        ):
            yield (
                f"{', '.join(dict.fromkeys(template_names))}: {image} runs here on Python"
                f" {local_version}, not {image_version[1]}: code for {image_version[1]} may fail."
                f" Set the image's interpreter in {cluster.home / IMAGES_FILE_NAME} ({image}:"
                " {python: /path/to/python})."
            )


def _check_program(container: Data, field_path: str, cluster: Cluster) -> None:
    image = container.get("image")
    if not image:
        raise ConfigError(f"{field_path}.image is missing: set it.")
    image_spec = cluster.image(image)
    if not (container.get("command") or image_spec.command or image_spec.args):
        raise ConfigError(
            f"{field_path}.command is missing, and the default command of {image} is not known"
            " here. Add it."
        )


def _check_environment(container: Data, field_path: str) -> None:
    for index, variable in enumerate(container.get("env") or []):
        if variable.get("value") and variable.get("valueFrom"):
            raise ConfigError(
                f"{field_path}[{index}] has both value and valueFrom: Kubernetes accepts only one"
                " of them."
            )


def _check_mounts(container: Data, field_path: str) -> None:
    index_of_path: dict[str, int] = {}
    for index, volume_mount in enumerate(container.get("volumeMounts") or []):
        mount_path = volume_mount["mountPath"]
        first_index = index_of_path.setdefault(mount_path, index)
        if first_index != index:
            raise ConfigError(
                f"{field_path}[{index}].mountPath is {mount_path!r}, which is also the path of"
                f" {field_path}[{first_index}]. Choose another path."
            )


def _check_resources(container: Data, field_path: str) -> None:
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for resource_name, requested_quantity in (resources.get("requests") or {}).items():
        if resource_name in limits and parse_quantity(requested_quantity) > parse_quantity(
            limits[resource_name]
        ):
            raise ConfigError(
                f"{field_path}.requests.{resource_name} is {requested_quantity}: it must be at"
                f" most limits.{resource_name} ({limits[resource_name]}), or Kubernetes rejects"
                " the pod. Raise the limit, or lower the request."
            )
