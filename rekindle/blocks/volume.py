"""A shared volume that caches datasets (`cluster.cache`), so that only the first pod downloads a
dataset from S3.

Pods of several runs can share the volume: each dataset is stored under its digest, written under a
lock and renamed when complete (rekindle/training/local_dataset.py). The volume contains only
copies, so after its loss the datasets are just downloaded again.
"""

from typing import Any

from rekindle.blocks.pod_settings import Manifest
from rekindle.kubernetes_names import REKINDLE_CACHE

CACHE_PATH = "/tmp/cache"  # in /tmp, the only directory to which pods can write


def volume_claim(name: str, size: str, storage_class: str = "", shared: bool = True) -> Manifest:
    """Return a PersistentVolumeClaim. If `shared` is True, all nodes can mount it (ReadWriteMany:
    NFS, EFS, Filestore, Azure Files), otherwise only one node.

    Source: Kubernetes v1 PersistentVolumeClaim.
    """
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if shared else "ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    # omit an empty storageClassName: without the field, Kubernetes uses the default class; an empty
    # text would disable provisioning
    if storage_class:
        spec["storageClassName"] = storage_class

    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": spec,
    }


def mount_cache(pod: Manifest, claim: str) -> Manifest:
    """Return the PodSpec with `claim` mounted as a cache of datasets; return it unchanged if
    `claim` is empty."""
    if not claim:
        return pod

    [main] = pod["containers"]
    main["env"] = [*main["env"], {"name": REKINDLE_CACHE, "value": CACHE_PATH}]
    main["volumeMounts"] = [*main["volumeMounts"], {"name": "cache", "mountPath": CACHE_PATH}]

    cache = {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}
    return pod | {"volumes": [*pod["volumes"], cache]}
