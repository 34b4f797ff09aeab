"""Run a module in a temporary pod of the namespace, from which the object store can be reached as
from a step.

    reports = run_for_result(cluster, workflow, TrainingReports, "rekindle.view.explain", ...)
"""

from argolocal.common.checked_names import format_untrusted
from argolocal.manifest.types import Object
from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster import pod_runner
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.workflows import get_effective_spec
from rekindle.documents import D, parse_and_validate
from rekindle.errors import RekindleError

REMEDY = "Check that the image has this version of Rekindle."
# time limit in seconds for the pod to start, run and end
POD_TIMEOUT_S = 180.0


def run_module(
    cluster: Cluster,
    workflow_object: Object,
    document_type: type[D],
    module_name: str,
    *module_arguments: str,
) -> list[D]:
    """Run `python -m MODULE ARGS` in the image of the run; return the JSON objects that it prints,
    one per line, as documents of the type `document_type`.

    Raises ApiError; raises RekindleError if the pod fails, takes longer than POD_TIMEOUT_S, or
    prints an object of another type.
    """
    step_image = _find_step_image(workflow_object)
    pod_description = f"the pod of image {step_image}, which reads the object store,"

    cluster_config = ClusterConfig.model_validate({"image": step_image})
    with pod_runner.run_pod(
        cluster,
        "rekindle",
        cluster_config,
        {"main": step_image},
        ["-m", module_name, *module_arguments],
        POD_TIMEOUT_S,
    ) as ended_pod:
        container_state = pod_runner.get_container_states(ended_pod).get("main", {})
        terminated_state = container_state.get("terminated")
        waiting_state = container_state.get("waiting") or {}

        if not terminated_state:
            waiting_cause = (
                waiting_state.get("message")
                or waiting_state.get("reason")
                or "it was not scheduled"
            )
            raise RekindleError(
                f"{pod_description} has not ended in {POD_TIMEOUT_S:g} s: {waiting_cause}."
            )

        log_lines = pod_runner.read_log(cluster, ended_pod)

    if terminated_state["exitCode"]:
        failure_reason = log_lines[-1].strip() if log_lines else "no output"
        raise RekindleError(
            f"{pod_description} ended with code {terminated_state['exitCode']}: {failure_reason}"
        )

    return [
        _parse_document(document_type, pod_description, line)
        for line in log_lines
        if line.startswith("{")
    ]


def run_for_result(
    cluster: Cluster,
    workflow_object: Object,
    document_type: type[D],
    module_name: str,
    *module_arguments: str,
) -> D:
    """Run a module as `run_module` does, and return the last JSON object that it prints. Raises
    ApiError, RekindleError."""
    printed_documents = run_module(
        cluster, workflow_object, document_type, module_name, *module_arguments
    )
    if not printed_documents:
        raise RekindleError(f"the pod that runs {module_name} printed no result. {REMEDY}")
    return printed_documents[-1]


def _parse_document(document_type: type[D], pod_description: str, json_line: str) -> D:
    try:
        return parse_and_validate(document_type, json_line)
    except ValueError as error:
        raise RekindleError(
            f"{pod_description} printed {format_untrusted(json_line)}, which is malformed: {error}."
            f" {REMEDY}"
        ) from None


def _find_step_image(workflow_object: Object) -> str:
    """Return the image of the first template that runs a step of Rekindle. Raises RekindleError if
    no template runs a step of Rekindle."""
    for workflow_template in get_effective_spec(workflow_object).get("templates") or []:
        container = workflow_template.get("container") or {}
        container_command = [*(container.get("command") or []), *(container.get("args") or [])]
        if container_command[1:4] == ["-m", "rekindle", "step"]:
            # skip the user's own containers, whose images may lack Rekindle
            return str(container["image"])
    raise RekindleError(
        f"{workflow_object['metadata']['name']} does not run a step of Rekindle: the object store"
        " can only be read with the image of such a step."
    )
