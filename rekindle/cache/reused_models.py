"""Find cached models for the trainings of a run before their jobs start, in the pod of `prepare`.

The look-up before a run cannot find these models, because the digest of the dataset is unknown
until `prepare` ends. Before scheduled runs, no look-up takes place at all.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import to_json
from rekindle.cache import lookup
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.content.weights import WEIGHTS_FILE
from rekindle.documents import MODEL_FILE
from rekindle.errors import say
from rekindle.keys import CACHED, CURVE, MODEL, cached_name
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST

if TYPE_CHECKING:
    from rekindle.storage import Store

# copied in this order, because the last file marks a complete training
MODEL_FILES = (WEIGHTS_FILE, CURVE, MODEL_FILE)
# object below RUN/TASK that names the run and task whose outputs were reused
REUSED_FROM_OBJECT = "cached"


def copy_model(store: "Store", source: str, target: str) -> None:
    """Copy the model of a training from one RUN/TASK to another. Raises StorageError."""
    for name in MODEL_FILES:
        store.copy(f"{source}/{MODEL}/{name}", f"{target}/{MODEL}/{name}")
    store.put(f"{target}/{REUSED_FROM_OBJECT}", source.encode())


def copy_reused_models(
    store: "Store",
    packed_manifest: str,
    cached: Mapping[str, Any],
    at: str,
    outputs: Mapping[str, str],
) -> dict[str, Any]:
    """Copy the models of identical trainings of earlier runs to the trainings of this run.

    `at`: RUN/TASK of the current step; `outputs`: outputs of this step. Return the workflow
    parameter CACHED, extended by the trainings whose models were copied. All other trainings run.
    """
    reused_models = dict(cached)

    try:
        for result in _look_up(store, packed_manifest, cached, at, outputs):
            target = f"{at.partition('/')[0]}/{result.task}"
            if result.entry and result.entry.at != target:
                copy_model(store, result.entry.at, target)
                name = cached_name(result.task)
                reused_models[name] = reused_models[name] | {"at": result.entry.at}
                say(
                    f"cached: {result.task} is the same training as {result.entry.at}; its job does"
                    " not start"
                )
    # catch all errors of the look-up, because the run can train instead
    except Exception as error:
        say(
            f"the models of earlier trainings are not looked up further: {type(error).__name__}:"
            f" {error}"
        )

    return reused_models


def _look_up(
    store: "Store",
    packed_manifest: str,
    cached: Mapping[str, Any],
    at: str,
    outputs: Mapping[str, str],
) -> list[lookup.CacheResult]:
    """Look up the trainings of the manifest, with the outputs of this step as known inputs."""
    spec = unpack_manifest(packed_manifest)["spec"]
    templates = spec.get("templates") or []
    jobs = {template["name"] for template in templates if "resource" in template}
    tasks = [
        task for template in templates for task in (template.get("dag") or {}).get("tasks") or []
    ]
    trainings = {cached_name(task["name"]) for task in tasks if task.get("template") in jobs}
    own_task = at.partition("/")[2]
    rows = {name: row for name, row in cached.items() if name in trainings}
    rows[cached_name(own_task)] = {"task": own_task, **outputs, "at": at}
    # omit the other parameters, because their values in this run may differ from the manifest;
    # inputs that use them then count as unknown
    arguments = {"parameters": [{"name": CACHED, "value": to_json(rows)}]}
    on_cluster = KUBERNETES_SERVICE_HOST in os.environ

    return lookup.look_up(
        {"spec": spec | {"arguments": arguments}}, {}, store, on_cluster=on_cluster, read_only=True
    )
