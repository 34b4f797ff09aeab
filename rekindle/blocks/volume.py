"""A shared volume that caches datasets: only the first pod downloads a dataset from S3
(`cluster.cache`).

A dataset is stored under its digest, written under a lock and renamed when complete
(rekindle/training/local_dataset.py), so pods of several runs can share the volume. A lost volume
costs a download; it never holds results.
"""

from typing import Any

from rekindle.blocks.pod_settings import Manifest
from rekindle.kubernetes_names import REKINDLE_CACHE

CACHE_PATH = "/tmp/cache"  # below /tmp, the only directory that pods can write to


def volume_claim(name: str, size: str, storage_class: str = "", shared: bool = True) -> Manifest:
    """Return a claim, `shared` by all nodes (ReadWriteMany: NFS, EFS, Filestore, Azure Files) or
    used by one node.

    Source: Kubernetes v1 PersistentVolumeClaim.
    """
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if shared else "ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    # without this field, Kubernetes uses the default class; an empty string would disable
    # provisioning
    if storage_class:
        spec["storageClassName"] = storage_class

    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": spec,
    }


def mount_cache(pod: Manifest, claim: str) -> Manifest:
    """Return the PodSpec with the claim mounted as a cache of datasets; unchanged if `claim` is
    empty."""
    if not claim:
        return pod

    [main] = pod["containers"]
    main["env"] = [*main["env"], {"name": REKINDLE_CACHE, "value": CACHE_PATH}]
    main["volumeMounts"] = [*main["volumeMounts"], {"name": "cache", "mountPath": CACHE_PATH}]

    cache = {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}
    return pod | {"volumes": [*pod["volumes"], cache]}
