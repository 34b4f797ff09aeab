"""Create the volumes of a pod as directories of this machine: emptyDir, configMap, secret,
projected, downwardAPI and claims.

A claim (PersistentVolumeClaim) is a directory in the home, the directory of runs. The directory of
a claim still exists after the pods have ended, and after the run has ended unless the run deletes
its claims. The behaviour follows Argo's addVolumeReferences, createPVCs and deletePVCs; Kubernetes'
volume plugins.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.common import object_names
from argolocal.errors import ConfigError
from argolocal.interfaces import Cluster
from argolocal.manifest.schema import find_ignored_fields
from argolocal.manifest.types import Data
from argolocal.manifest.volume_claims import GC_STRATEGIES, list_volume_mounts
from argolocal.pods import filesystem

# (fieldPath, name of the variable or file) → value
FieldValue = Callable[[str, str], str]
VOLUME_KINDS = (
    "emptyDir",
    "configMap",
    "secret",
    "projected",
    "downwardAPI",
    "persistentVolumeClaim",
)
READ_ONLY_VOLUME_KINDS = VOLUME_KINDS[1:5]


@dataclass(frozen=True)
class VolumeDirectory:
    """The directory on this machine with the contents of a volume."""

    path: Path
    read_only: bool = False


def delete(cluster: Cluster, volume: Data) -> None:
    """Delete the directory of a claim and its contents."""
    shutil.rmtree(
        _claim_path(cluster, volume["persistentVolumeClaim"]["claimName"]), ignore_errors=True
    )


def create(
    volumes: list[Data],
    folder: Path,
    cluster: Cluster,
    read_field: FieldValue,
    run_claims: Collection[str],
) -> dict[str, VolumeDirectory]:
    """Create the directories of a pod's volumes below `folder`; directories of claims are in the
    home (the directory of all runs) instead. Return the directories by the names of the volumes.
    `run_claims`: names of the claims that the run creates.

    Raises ConfigError for a missing ConfigMap, Secret, key or claim.
    """
    directories: dict[str, VolumeDirectory] = {}

    for volume in volumes:
        volume_name = volume["name"]
        object_names.LABEL_RULE.check(volume_name, "the name of a volume")

        claim = volume.get("persistentVolumeClaim")
        if claim:
            volume_path = _claim_path(cluster, claim["claimName"])
            if claim["claimName"] not in run_claims and not cluster.find(
                "PersistentVolumeClaim", claim["claimName"]
            ):
                raise ConfigError(
                    f"volume {volume_name}: the PersistentVolumeClaim {claim['claimName']!r} does"
                    " not exist here: add it to the Workflow's file, separated by ---, or use"
                    " volumeClaimTemplates."
                )

            volume_path.mkdir(parents=True, exist_ok=True)
            directories[volume_name] = VolumeDirectory(volume_path, bool(claim.get("readOnly")))
            continue

        volume_path = folder / volume_name
        directories[volume_name] = VolumeDirectory(
            volume_path, any(volume_kind in volume for volume_kind in READ_ONLY_VOLUME_KINDS)
        )
        volume_path.mkdir(
            mode=0o777 if "emptyDir" in volume else 0o755, parents=True, exist_ok=True
        )

        for file, file_content, file_mode in _list_volume_files(volume, cluster, read_field):
            if not (volume_path / file).resolve().is_relative_to(volume_path.resolve()):
                raise ConfigError(
                    f"volume {volume_name}: the path {file!r} leads out of it. Use a path inside"
                    " the volume."
                )

            (volume_path / file).parent.mkdir(parents=True, exist_ok=True)
            with open(
                os.open(volume_path / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as volume_file:
                volume_file.write(file_content)
                os.fchmod(volume_file.fileno(), file_mode)

    return directories


def remove_contents(directories: Mapping[str, VolumeDirectory], folder: Path) -> None:
    """Delete the read-only volumes below `folder`, because Secrets and ConfigMaps must not stay on
    disk."""
    for directory in directories.values():
        if directory.read_only and directory.path.is_relative_to(folder):
            shutil.rmtree(directory.path, ignore_errors=True)


def make_bind_mounts(
    volumes: Mapping[str, VolumeDirectory],
    volume_mounts: list[Data],
    expand_expression: Callable[[str], str] = str,
) -> list[tuple[Path, str, bool]]:
    """Return (source, mount path, read only) for each volume mount of a container, outer mounts
    first. A subPath that does not exist is created as a directory. `expand_expression`: function
    that evaluates a subPathExpr.

    Raises ConfigError, for example for a missing subPath in a read-only volume.
    """
    bind_mounts = []

    for volume_mount in volume_mounts:
        volume = volumes.get(volume_mount["name"])
        if volume is None:
            raise ConfigError(f"volume '{volume_mount['name']}' not found in workflow spec")

        sub_path = volume_mount.get("subPath") or expand_expression(
            volume_mount.get("subPathExpr") or ""
        )
        source_path = volume.path / sub_path
        if not source_path.resolve().is_relative_to(volume.path.resolve()):
            raise ConfigError(
                f"volume {volume_mount['name']}: {sub_path!r} leads out of it. Use a path inside"
                " the volume."
            )

        if not source_path.exists():
            if volume.read_only:
                raise ConfigError(
                    f"volume {volume_mount['name']}: {sub_path!r} does not exist in the volume."
                )

            source_path.mkdir(parents=True)

        mount_path = os.path.join("/", volume_mount["mountPath"])
        if filesystem.find_unsupported_path([mount_path]):
            raise ConfigError(
                f"volume {volume_mount['name']}: {mount_path} is in a system directory. Use a path"
                " below /tmp."
            )

        is_read_only = bool(volume.read_only or volume_mount.get("readOnly"))
        bind_mounts.append((source_path, mount_path, is_read_only))

    return sorted(bind_mounts, key=lambda bind_mount: bind_mount[1].count("/"))


def _claim_path(cluster: Cluster, claim_name: str) -> Path:
    object_names.check_object_name("PersistentVolumeClaim", claim_name)
    return cluster.home / "claims" / claim_name


def _list_volume_files(
    volume: Data, cluster: Cluster, read_field: FieldValue, default_mode: int = 0o644
) -> Iterator[tuple[str, bytes, int]]:
    """Yield path, content and mode of every file that Kubernetes would write into a volume.
    `default_mode`: mode of the files if the volume has no defaultMode. Raises ConfigError."""
    for volume_kind in READ_ONLY_VOLUME_KINDS:
        volume_source = volume.get(volume_kind) or {}
        if volume_source.get("defaultMode") is None:
            source_mode = default_mode
        else:
            source_mode = int(volume_source["defaultMode"])

        if volume_kind == "projected":
            for projection in volume_source.get("sources") or []:
                yield from _list_volume_files(
                    {"name": volume["name"], **projection}, cluster, read_field, source_mode
                )
        elif volume_kind == "downwardAPI":
            for projected_item in volume_source.get("items") or []:
                field_text = read_field(
                    projected_item["fieldRef"]["fieldPath"], projected_item["path"]
                )
                yield (
                    projected_item["path"],
                    field_text.encode(),
                    int(projected_item.get("mode", source_mode)),
                )
        elif volume_source:
            for file_path, file_content, file_mode in _list_object_files(
                volume_kind, volume_source, volume["name"], cluster
            ):
                yield file_path, file_content, source_mode if file_mode is None else file_mode


def _list_object_files(
    volume_kind: str, volume_source: Data, volume_name: str, cluster: Cluster
) -> Iterator[tuple[str, bytes, int | None]]:
    """Yield path, content and mode of the files in a ConfigMap or Secret. The mode of a file is
    None if the volume does not set one for this file. Raises ConfigError."""
    object_name = volume_source.get("secretName") or volume_source["name"]
    object_kind = "ConfigMap" if volume_kind == "configMap" else "Secret"

    object_files = cluster.files(object_kind, object_name)
    if object_files is None and volume_source.get("optional"):
        return

    if object_files is None:
        raise ConfigError(
            f"volume {volume_name}: the {object_kind} {object_name!r} does not exist here: add it"
            " to the Workflow's file, separated by ---."
        )

    selected_items = volume_source.get("items")
    if selected_items is None:
        selected_items = [{"key": data_key, "path": data_key} for data_key in object_files]

    for selected_item in selected_items:
        if selected_item["key"] in object_files:
            yield (
                selected_item["path"],
                object_files[selected_item["key"]],
                None if selected_item.get("mode") is None else int(selected_item["mode"]),
            )
        elif not volume_source.get("optional"):
            raise ConfigError(
                f"volume {volume_name}: the {object_kind} {object_name!r} does not contain the key"
                f" {selected_item['key']!r}."
            )


def check_without_mounts(volumes: list[Data], pod_name: str) -> None:
    """Raise ConfigError for a volume of a pod that runs without mount namespaces, unless the volume
    is an emptyDir."""
    for volume in volumes:
        if "emptyDir" not in volume:
            raise ConfigError(
                f"{pod_name}: the volume {volume['name']} needs private mount namespaces, which"
                " are not available here. Remove the volume, or use another machine."
            )


def check_pod_volumes(spec: Data, field_path: str) -> None:
    """Raise ConfigError for a volume or mount of a PodSpec that is invalid or not supported
    here."""
    _check_volumes(spec, field_path)
    volume_names = {volume["name"] for volume in spec.get("volumes") or []}
    for index, volume in enumerate(spec.get("volumes") or []):
        list(find_ignored_fields(volume, "Volume", f"{field_path}.volumes[{index}]"))
    for container in spec.get("containers") or []:
        for index, volume_mount in enumerate(container.get("volumeMounts") or []):
            list(
                find_ignored_fields(
                    volume_mount,
                    "Mount",
                    f"{field_path}.{container.get('name')}.volumeMounts[{index}]",
                )
            )
            _check_mount(volume_mount, volume_names, f"{field_path}.{container.get('name')}")


def _check_volumes(volume_owner: Data, field_path: str) -> None:
    """Raise ConfigError for an invalid volume of a pod, template or workflow."""
    for index, volume in enumerate(volume_owner.get("volumes") or []):
        volume_kinds = [
            volume_field
            for volume_field in volume
            if volume_field != "name" and volume[volume_field] is not None
        ]
        if len(volume_kinds) != 1:
            raise ConfigError(
                f"{field_path}.volumes[{index}] has the kinds {volume_kinds}: it must have exactly"
                " one kind."
            )
        object_names.LABEL_RULE.check(volume.get("name"), f"{field_path}: the name of a volume")


def _check_mount(volume_mount: Data, volume_names: Collection[str], field_path: str) -> None:
    if volume_mount["name"] not in volume_names:
        valid_names_text = ", ".join(sorted(volume_names)) or "one of spec.volumes"
        raise ConfigError(
            f"{field_path} mounts {volume_mount['name']!r}, which is not a volume: it must be"
            f" {valid_names_text}."
        )


def check_volumes(spec: Data, templates: list[tuple[dict[str, Any], str]]) -> None:
    """Raise ConfigError for an invalid volume, mount or volumeClaimGC of a workflow. `templates`:
    the templates with their field paths."""
    shared_volumes = [
        *(spec.get("volumes") or []),
        *((spec.get("templateDefaults") or {}).get("volumes") or []),
    ]
    claims = [claim["metadata"] for claim in spec.get("volumeClaimTemplates") or []]

    strategy = (spec.get("volumeClaimGC") or {}).get("strategy") or GC_STRATEGIES[0]
    if strategy not in GC_STRATEGIES:
        raise ConfigError(
            f"spec.volumeClaimGC.strategy is {strategy!r}: it must be one of"
            f" {', '.join(GC_STRATEGIES)}."
        )

    for volume_owner, field_path in [(spec, "spec"), *templates]:
        _check_volumes(volume_owner, field_path)

    for claim in claims:
        object_names.LABEL_RULE.check(claim["name"], "spec: the name of a volume")

    for template, field_path in templates:
        volume_names = {
            volume["name"]
            for volume in [*(template.get("volumes") or []), *shared_volumes, *claims]
        }
        for volume_mount in list_volume_mounts(template):
            _check_mount(volume_mount, volume_names, field_path)
