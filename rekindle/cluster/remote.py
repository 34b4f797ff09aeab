"""Run a module in a pod of the namespace, because pods reach the object store as steps do; then
delete the pod.

reports = run_for_result(cluster, workflow, TrainingReports, "rekindle.view.explain", ...)
"""

from argolocal.common.checked_names import show
from argolocal.manifest.types import Object
from rekindle.blocks.settings import ClusterConfig
from rekindle.cluster import pod_runner
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.workflows import spec_of
from rekindle.documents import D, validate
from rekindle.errors import RekindleError

REMEDY = "Check that the image has this version of Rekindle."
POD_TIMEOUT_S = 180.0  # time limit in seconds for the pod to start, run and end


def run_module(
    cluster: Cluster, workflow: Object, model: type[D], module: str, *args: str
) -> list[D]:
    """Run `python -m MODULE ARGS` in the image of the run; return the JSON objects that it prints,
    one per line, as documents of the type `model`.

    Raises ApiError; raises RekindleError if the pod fails, takes longer than POD_TIMEOUT_S, or
    prints an object of another type.
    """
    image = _image_of(workflow)
    subject = f"the pod of image {image}, which reads the object store,"

    config = ClusterConfig.model_validate({"image": image})
    with pod_runner.run_pod(
        cluster, "rekindle", config, {"main": image}, ["-m", module, *args], POD_TIMEOUT_S
    ) as ended_pod:
        state = pod_runner.container_states(ended_pod).get("main", {})
        terminated = state.get("terminated")
        waiting = state.get("waiting") or {}

        if not terminated:
            cause = waiting.get("message") or waiting.get("reason") or "it was not scheduled"
            raise RekindleError(f"{subject} has not ended in {POD_TIMEOUT_S:g} s: {cause}.")

        lines = pod_runner.read_log(cluster, ended_pod)

    if terminated["exitCode"]:
        reason = lines[-1].strip() if lines else "no output"
        raise RekindleError(f"{subject} ended with code {terminated['exitCode']}: {reason}")

    return [_parse(model, subject, line) for line in lines if line.startswith("{")]


def run_for_result(
    cluster: Cluster, workflow: Object, model: type[D], module: str, *args: str
) -> D:
    """Run a module as `run_module` does, and return the last JSON object that it prints. Raises
    ApiError, RekindleError."""
    records = run_module(cluster, workflow, model, module, *args)
    if not records:
        raise RekindleError(f"the pod that runs {module} printed no result. {REMEDY}")
    return records[-1]


def _parse(model: type[D], subject: str, line: str) -> D:
    try:
        return validate(model, line)
    except ValueError as error:
        raise RekindleError(
            f"{subject} printed {show(line)}, which is malformed: {error}. {REMEDY}"
        ) from None


def _image_of(workflow: Object) -> str:
    """Return the image of the first template that runs a step of Rekindle. Raises RekindleError if
    no template runs a step of Rekindle."""
    for template in spec_of(workflow).get("templates") or []:
        container = template.get("container") or {}
        command = [*(container.get("command") or []), *(container.get("args") or [])]
        if command[1:4] == ["-m", "rekindle", "step"]:
            # skip the user's own containers, which may not contain Rekindle
            return str(container["image"])
    raise RekindleError(
        f"{workflow['metadata']['name']} does not run a step of Rekindle: the object store can only"
        " be read with the image of such a step."
    )
