"""A volume before the object store: datasets are fetched from S3 once and found there by every pod after that.

    volume_claim("datasets", "200Gi", storage_class="filestore")     # once a namespace: kubectl apply -f -
    cluster: {cache: datasets}                                       # in a config: training pods look there first

A dataset lies under its digest, is written under a lock and appears whole (rekindle/training/data.py), so pods of
several runs share the volume; S3 stays the truth, and a lost volume costs a download. Results never go there.
"""

from typing import Any

from rekindle.blocks.pod import Manifest

CACHE = "REKINDLE_CACHE"  # rekindle/training/data.py, which is slow to import
PATH = "/tmp/cache"  # below the one directory where pods write, so that it is theirs on any machine


def volume_claim(name: str, size: str, storage_class: str = "", shared: bool = True) -> Manifest:
    """`shared` by pods of all nodes (ReadWriteMany: NFS, EFS, Filestore, Azure Files) or by those of one.

    Source: Kubernetes v1 PersistentVolumeClaim.
    """
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if shared else "ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    if storage_class:  # absent, it is the cluster's default; empty would mean none
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def cached(pod: Manifest, claim: str) -> Manifest:
    """A PodSpec whose container looks for datasets on the claim first; as it is without one."""
    if not claim:
        return pod
    [main] = pod["containers"]
    main |= {"env": [*main["env"], {"name": CACHE, "value": PATH}]}
    main |= {"volumeMounts": [*main["volumeMounts"], {"name": "cache", "mountPath": PATH}]}
    return pod | {"volumes": [*pod["volumes"], {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}]}
