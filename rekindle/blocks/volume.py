"""A shared volume that caches datasets (`cluster.cache`), so that only the first pod downloads a
dataset from S3.

Pods of several runs can share the volume: each dataset is stored under its digest, written under a
lock and renamed when complete (rekindle/training/local_dataset.py). The shared volume contains only
copies: if the volume is lost, the datasets are downloaded again.
"""

from typing import Any

from rekindle.blocks.pod_settings import Manifest
from rekindle.kubernetes_names import REKINDLE_CACHE

# path of the dataset cache, in /tmp, because pods can write only to /tmp
CACHE_PATH = "/tmp/cache"


def volume_claim(name: str, size: str, storage_class: str = "", shared: bool = True) -> Manifest:
    """Return a PersistentVolumeClaim. If `shared` is True, all nodes can mount the volume
    (ReadWriteMany, for example NFS, EFS, Filestore or Azure Files), otherwise only one node.

    Source: the fields are defined by Kubernetes (v1, PersistentVolumeClaim).
    """
    claim_spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if shared else "ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    # omit an empty storageClassName, so that Kubernetes uses the default class: an empty text would
    # disable provisioning
    if storage_class:
        claim_spec["storageClassName"] = storage_class

    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": claim_spec,
    }


def mount_cache(pod: Manifest, claim: str) -> Manifest:
    """Return the PodSpec with the volume `claim` mounted as a cache of datasets; return the PodSpec
    unchanged if `claim` is empty."""
    if not claim:
        return pod

    [main_container] = pod["containers"]
    main_container["env"] = [*main_container["env"], {"name": REKINDLE_CACHE, "value": CACHE_PATH}]
    main_container["volumeMounts"] = [
        *main_container["volumeMounts"],
        {"name": "cache", "mountPath": CACHE_PATH},
    ]

    cache_volume = {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}
    return pod | {"volumes": [*pod["volumes"], cache_volume]}
