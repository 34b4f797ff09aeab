"""Find cached models for the trainings of a run before their jobs start, in the pod of `prepare`.

The look-up before a run cannot find the models of trainings, because the digest of the dataset is
unknown until `prepare` ends. For scheduled runs, no look-up takes place before the run.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import to_json
from rekindle.cache import lookup
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.content.weights import WEIGHTS_FILE
from rekindle.documents import MODEL_FILE
from rekindle.errors import write_stderr
from rekindle.keys import CACHED_PARAMETER, CURVE, MODEL, cached_name
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST

if TYPE_CHECKING:
    from rekindle.storage import Store

# files of a model, in the order of copying: the last file marks a complete training
MODEL_FILES = (WEIGHTS_FILE, CURVE, MODEL_FILE)
# object below RUN/TASK that names the run and task whose outputs were reused
REUSED_FROM_OBJECT = "cached"


def copy_model(store: "Store", source_task: str, target_task: str) -> None:
    """Copy the model of a training from one RUN/TASK to another. Raises StorageError."""
    for name in MODEL_FILES:
        store.copy(f"{source_task}/{MODEL}/{name}", f"{target_task}/{MODEL}/{name}")
    store.put(f"{target_task}/{REUSED_FROM_OBJECT}", source_task.encode())


def copy_reused_models(
    store: "Store",
    packed_manifest: str,
    cached_rows: Mapping[str, Any],
    own_reference: str,
    step_outputs: Mapping[str, str],
) -> dict[str, Any]:
    """Copy the models of identical trainings of earlier runs to the trainings of this run.

    `own_reference` is the RUN/TASK of the current step; `step_outputs`: outputs of the current
    step. Return the workflow parameter CACHED, extended by the trainings whose models were copied.
    A training whose model was not copied runs.
    """
    reused_models = dict(cached_rows)

    try:
        for cache_result in _look_up_trainings(
            store, packed_manifest, cached_rows, own_reference, step_outputs
        ):
            target_task = f"{own_reference.partition('/')[0]}/{cache_result.task}"
            if cache_result.entry and cache_result.entry.at != target_task:
                copy_model(store, cache_result.entry.at, target_task)
                name = cached_name(cache_result.task)
                reused_models[name] = reused_models[name] | {"at": cache_result.entry.at}
                write_stderr(
                    f"cached: {cache_result.task} is the same training as {cache_result.entry.at};"
                    " its job does not start"
                )
    # catch all exceptions, because the run can train the models instead of reusing them
    except Exception as error:
        write_stderr(
            f"the models of earlier trainings are not looked up further: {type(error).__name__}:"
            f" {error}"
        )

    return reused_models


def _look_up_trainings(
    store: "Store",
    packed_manifest: str,
    cached_rows: Mapping[str, Any],
    own_reference: str,
    step_outputs: Mapping[str, str],
) -> list[lookup.CacheResult]:
    """Look up the trainings of the manifest in the cache, with the outputs of the current step as
    known inputs."""
    workflow_spec = unpack_manifest(packed_manifest)["spec"]
    templates = workflow_spec.get("templates") or []
    job_templates = {template["name"] for template in templates if "resource" in template}
    dag_tasks = [
        dag_task
        for template in templates
        for dag_task in (template.get("dag") or {}).get("tasks") or []
    ]
    training_names = {
        cached_name(dag_task["name"])
        for dag_task in dag_tasks
        if dag_task.get("template") in job_templates
    }
    own_task_name = own_reference.partition("/")[2]
    training_rows = {
        name: cached_row for name, cached_row in cached_rows.items() if name in training_names
    }
    training_rows[cached_name(own_task_name)] = {
        "task": own_task_name,
        **step_outputs,
        "at": own_reference,
    }
    # omit the other workflow parameters, because their values in this run may differ from those in
    # the manifest; inputs that use them count as unknown
    workflow_arguments = {
        "parameters": [{"name": CACHED_PARAMETER, "value": to_json(training_rows)}]
    }
    is_on_cluster = KUBERNETES_SERVICE_HOST in os.environ

    return lookup.look_up_tasks(
        {"spec": workflow_spec | {"arguments": workflow_arguments}},
        {},
        store,
        is_on_cluster=is_on_cluster,
        is_read_only=True,
    )
