"""Create the volumes of a pod as directories of this machine: emptyDir, configMap, secret,
projected, downwardAPI and claims.

A claim is a directory in the home. It outlives pods and, unless the run deletes its claims, also
runs. Sources: Argo's addVolumeReferences, createPVCs and deletePVCs; Kubernetes' volume plugins.
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
from argolocal.manifest.schema import walk
from argolocal.manifest.types import Data
from argolocal.manifest.volume_claims import GC_STRATEGIES, mounts
from argolocal.pods import filesystem

FieldValue = Callable[[str, str], str]  # (fieldPath, name of the variable or file) → value
KINDS = ("emptyDir", "configMap", "secret", "projected", "downwardAPI", "persistentVolumeClaim")
READ_ONLY_KINDS = KINDS[1:5]


@dataclass(frozen=True)
class VolumeDirectory:
    """The directory of a volume."""

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
    field_value: FieldValue,
    run_claims: Collection[str],
) -> dict[str, VolumeDirectory]:
    """Create the directories of volumes. `run_claims`: names of the claims that the run creates.

    Raises ConfigError for a missing ConfigMap, Secret, key or claim.
    """
    directories: dict[str, VolumeDirectory] = {}

    for volume in volumes:
        name = volume["name"]
        object_names.LABEL.check(name, "the name of a volume")

        claim = volume.get("persistentVolumeClaim")
        if claim:
            path = _claim_path(cluster, claim["claimName"])
            if claim["claimName"] not in run_claims and not cluster.find(
                "PersistentVolumeClaim", claim["claimName"]
            ):
                raise ConfigError(
                    f"volume {name}: the PersistentVolumeClaim {claim['claimName']!r} does not"
                    " exist here: add it to the Workflow's file, separated by ---, or use"
                    " volumeClaimTemplates."
                )

            path.mkdir(parents=True, exist_ok=True)
            directories[name] = VolumeDirectory(path, bool(claim.get("readOnly")))
            continue

        path = folder / name
        directories[name] = VolumeDirectory(path, any(kind in volume for kind in READ_ONLY_KINDS))
        path.mkdir(mode=0o777 if "emptyDir" in volume else 0o755, parents=True, exist_ok=True)

        for file, content, mode in _files(volume, cluster, field_value):
            if not (path / file).resolve().is_relative_to(path.resolve()):
                raise ConfigError(
                    f"volume {name}: the path {file!r} leads out of it. Use a path inside the"
                    " volume."
                )

            (path / file).parent.mkdir(parents=True, exist_ok=True)
            with open(
                os.open(path / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as out:
                out.write(content)
                os.fchmod(out.fileno(), mode)

    return directories


def remove_contents(directories: Mapping[str, VolumeDirectory], folder: Path) -> None:
    """Delete the contents of volumes with Secrets or ConfigMaps below `folder`, because they must
    not stay on disk."""
    for directory in directories.values():
        if directory.read_only and directory.path.is_relative_to(folder):
            shutil.rmtree(directory.path, ignore_errors=True)


def bind_mounts(
    volumes: Mapping[str, VolumeDirectory],
    mounts: list[Data],
    expand: Callable[[str], str] = str,
) -> list[tuple[Path, str, bool]]:
    """Return (source, mount path, read only) of a container's volume mounts. `expand` evaluates a
    subPathExpr.

    Raises ConfigError for a missing subPath in a read-only volume.
    """
    binds = []

    for mount in mounts:
        volume = volumes.get(mount["name"])
        if volume is None:
            raise ConfigError(f"volume '{mount['name']}' not found in workflow spec")

        sub_path = mount.get("subPath") or expand(mount.get("subPathExpr") or "")
        path = volume.path / sub_path
        if not path.resolve().is_relative_to(volume.path.resolve()):
            raise ConfigError(
                f"volume {mount['name']}: {sub_path!r} leads out of it. Use a path inside the"
                " volume."
            )

        if not path.exists():
            if volume.read_only:
                raise ConfigError(
                    f"volume {mount['name']}: {sub_path!r} does not exist in the volume."
                )

            path.mkdir(parents=True)

        mount_path = os.path.join("/", mount["mountPath"])
        if filesystem.unsupported_path([mount_path]):
            raise ConfigError(
                f"volume {mount['name']}: {mount_path} is in a system directory. Use a path below"
                " /tmp."
            )

        binds.append((path, mount_path, bool(volume.read_only or mount.get("readOnly"))))

    return sorted(binds, key=lambda bind: bind[1].count("/"))


def _claim_path(cluster: Cluster, name: str) -> Path:
    object_names.check_object("PersistentVolumeClaim", name)
    return cluster.home / "claims" / name


def _files(
    volume: Data, cluster: Cluster, field_value: FieldValue, mode: int = 0o644
) -> Iterator[tuple[str, bytes, int]]:
    """Yield path, content and mode of every file of a volume."""
    for kind in READ_ONLY_KINDS:
        source = volume.get(kind) or {}
        if source.get("defaultMode") is None:
            default = mode
        else:
            default = int(source["defaultMode"])

        if kind == "projected":
            for projection in source.get("sources") or []:
                yield from _files(
                    {"name": volume["name"], **projection}, cluster, field_value, default
                )
        elif kind == "downwardAPI":
            for item in source.get("items") or []:
                text = field_value(item["fieldRef"]["fieldPath"], item["path"])
                yield item["path"], text.encode(), int(item.get("mode", default))
        elif source:
            for path, content, file_mode in _object_files(kind, source, volume["name"], cluster):
                yield path, content, default if file_mode is None else file_mode


def _object_files(
    kind: str, source: Data, volume: str, cluster: Cluster
) -> Iterator[tuple[str, bytes, int | None]]:
    name = source.get("secretName") or source["name"]
    kind = "ConfigMap" if kind == "configMap" else "Secret"

    data = cluster.files(kind, name)
    if data is None and source.get("optional"):
        return

    if data is None:
        raise ConfigError(
            f"volume {volume}: the {kind} {name!r} does not exist here: add it to the "
            "Workflow's file, separated by ---."
        )

    items = source.get("items")
    for item in [{"key": key, "path": key} for key in data] if items is None else items:
        if item["key"] in data:
            yield (
                item["path"],
                data[item["key"]],
                None if item.get("mode") is None else int(item["mode"]),
            )
        elif not source.get("optional"):
            raise ConfigError(
                f"volume {volume}: the {kind} {name!r} does not contain the key {item['key']!r}."
            )


def check_without_mounts(volumes: list[Data], pod: str) -> None:
    """Raise ConfigError for a volume that needs mount namespaces."""
    for volume in volumes:
        if "emptyDir" not in volume:
            raise ConfigError(
                f"{pod}: the volume {volume['name']} needs private mount namespaces, which are not"
                " available here. Remove the volume, or use another machine."
            )


def check_pod(spec: Data, where: str) -> None:
    """Raise ConfigError for a volume or mount of a PodSpec that is invalid or not supported
    here."""
    _check_volumes(spec, where)
    names = {volume["name"] for volume in spec.get("volumes") or []}
    for index, volume in enumerate(spec.get("volumes") or []):
        list(walk(volume, "Volume", f"{where}.volumes[{index}]"))
    for container in spec.get("containers") or []:
        for index, mount in enumerate(container.get("volumeMounts") or []):
            list(walk(mount, "Mount", f"{where}.{container.get('name')}.volumeMounts[{index}]"))
            _check_mount(mount, names, f"{where}.{container.get('name')}")


def _check_volumes(owner: Data, where: str) -> None:
    for index, volume in enumerate(owner.get("volumes") or []):
        kinds = [key for key in volume if key != "name" and volume[key] is not None]
        if len(kinds) != 1:
            raise ConfigError(
                f"{where}.volumes[{index}] has the kinds {kinds}: it must have exactly one kind."
            )
        object_names.LABEL.check(volume.get("name"), f"{where}: the name of a volume")


def _check_mount(mount: Data, names: Collection[str], where: str) -> None:
    if mount["name"] not in names:
        valid_names = ", ".join(sorted(names)) or "one of spec.volumes"
        raise ConfigError(
            f"{where} mounts {mount['name']!r}, which is not a volume: it must be {valid_names}."
        )


def check(spec: Data, templates: list[tuple[dict[str, Any], str]]) -> None:
    """Raise ConfigError for a mount of an unknown volume, and for a volume without exactly one
    kind."""
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

    for owner, where in [(spec, "spec"), *templates]:
        _check_volumes(owner, where)

    for claim in claims:
        object_names.LABEL.check(claim["name"], "spec: the name of a volume")

    for template, where in templates:
        names = {
            volume["name"]
            for volume in [*(template.get("volumes") or []), *shared_volumes, *claims]
        }
        for mount in mounts(template):
            _check_mount(mount, names, where)
