"""Build the Argo container template of a step module.

Each field of the step's Inputs and Outputs becomes a parameter or artifact of the same name. All
tasks of a step share the template, so the object key of an output artifact contains the name of the
task (the parameter TASK) and, in a loop, the name of the pod.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hera.workflows import (
    Artifact,
    Container,
    NoneArchiveStrategy,
    Parameter,
    RetryStrategy,
    S3Artifact,
    Script,
)
from hera.workflows import models as m
from pydantic.fields import FieldInfo

from argolocal.common import exit_codes
from argolocal.common.json_text import to_json
from rekindle.blocks import pod_settings as pods
from rekindle.blocks.jobs import gang
from rekindle.blocks.manifest.quoting import format_input, quote_argument
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import TASK, key, reuse
from rekindle.step import Step, flag, is_artifact, load, to_text

RETRY_CONDITION = f"lastRetry.exitCode not in {[str(code) for code in exit_codes.PERMANENT]}"


def retries(limit: int, expression: str | None = None, factor: int = 3) -> RetryStrategy:
    """Return a retry strategy that retries a pod if `expression` is true, whether its phase is
    Failed (for example evicted) or Error (deleted)."""
    backoff = m.Backoff(duration="2s", factor=m.IntOrString(root=factor), cap="1m")
    return RetryStrategy(limit=limit, retry_policy="Always", backoff=backoff, expression=expression)


def retry_watcher(limit: int) -> RetryStrategy:
    """Return the retry strategy of a pod that watches a job. After a retry, the new pod continues
    to watch the same job.

    If the job itself has failed, the pod is not retried, because the job has already used up its
    own retries. If the API server rejects the pod's request, the pod is retried `limit` times.
    """
    unavailable_pattern = (
        "'failed calling webhook|connection re|imeout|EOF|unavailable|nternal error'"
    )
    transient_failure = (
        "!(lastRetry.message contains 'no more retries') || lastRetry.message matches"
        f" {unavailable_pattern}"
    )
    job_is_healthy = (
        f"!(lastRetry.message contains 'failure condition') && (asInt(retries) < {limit} ||"
        f" {transient_failure})"
    )
    backoff = m.Backoff(duration="10s")

    # set a limit, because Argo ignores the backoff of a strategy without one
    return RetryStrategy(
        limit=1_000_000, retry_policy="Always", backoff=backoff, expression=job_is_healthy
    )


def step_template(
    name: str, module: str, cluster: ClusterConfig, pod: PodConfig, *, in_loop: bool = False
) -> Container:
    """Return the template `name` that runs the step `module`; with `in_loop`, the template is for
    tasks in loops."""
    definition = load(module)
    args = ["-m", "rekindle", "step", module]
    inputs: list[Any] = []
    outputs: list[Any] = []

    for field, info in definition.Inputs.model_fields.items():
        if is_artifact(info):
            inputs.append(Artifact(name=field, path=f"/tmp/inputs/{field}"))
            args.append(f"{flag(field)}={{{{inputs.artifacts.{field}.path}}}}")
            continue

        parameter = Parameter(name=field)
        if not info.is_required():
            default = info.get_default(call_default_factory=True)
            # text cannot express None: if the default is None, omit the flag, so that the step uses
            # its default
            if default is None:
                continue
            parameter.default = to_text(default)

        inputs.append(parameter)
        args.append(quote_argument(f"{flag(field)}={{{{inputs.parameters.{field}}}}}"))

    for field, info in definition.Outputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        args += ["--output", f"{field}={{{{outputs.{kind}.{field}.path}}}}"]
        outputs.append(_output(field, info, in_loop))

    if needs_task_name(definition):
        inputs.append(Parameter(name=TASK))

    env: list[Any] = []
    if hasattr(definition, "REUSE") and not in_loop:
        entry = f"{{{{workflow.name}}}}/{{{{inputs.parameters.{TASK}}}}}"
        args += [quote_argument(f"--entry={entry}"), quote_argument(f"--reuse={reuse()}")]
        env = [m.EnvVar.model_validate(variable) for variable in pods.image_variables(pod.image)]

    return Container(
        name=name,
        image=pod.image,
        image_pull_policy="IfNotPresent",
        command=["python"],
        args=args,
        inputs=inputs,
        outputs=outputs,
        env=env or None,
        env_from=[m.EnvFromSource.model_validate(source) for source in pods.environment_sources()],
        resources=m.ResourceRequirements.model_validate(pods.resources(pod)),
        security_context=m.SecurityContext.model_validate(pods.CONTAINER_SECURITY),
        volumes=[m.Volume.model_validate(volume) for volume in pods.tmp_volumes(pod)],
        volume_mounts=[m.VolumeMount.model_validate(mount) for mount in pods.TMP_MOUNTS],
        **placement_fields(pod),
        pod_spec_patch=to_json(pods.EXECUTOR_SECURITY),
        retry_strategy=retries(cluster.retries, RETRY_CONDITION),
        active_deadline_seconds=60 * pod.deadline_minutes,
    )


def _output(field: str, info: FieldInfo, in_loop: bool) -> Parameter | S3Artifact:
    """Return the output of a template for a field of the step. In a loop, each pod stores its
    artifact under its own key."""
    path = f"/tmp/outputs/{field}"
    if not is_artifact(info):
        return Parameter(name=field, value_from=m.ValueFrom(path=path))

    file = f"{{{{pod.name}}}}/{field}" if in_loop else field
    object_key = key(f"{{{{inputs.parameters.{TASK}}}}}", file)
    return S3Artifact(name=field, path=path, key=object_key, archive=NoneArchiveStrategy())


def set_worker_settings(template: Container, cluster: ClusterConfig, pod: PodConfig) -> Container:
    """Set the grace period, preemption notices and queue of `template`, whose step trains in its
    own pod, as for the workers of a training job."""
    patch = pods.EXECUTOR_SECURITY | {"terminationGracePeriodSeconds": pod.grace_seconds}
    template.pod_spec_patch = to_json(patch)
    variables = [m.EnvVar.model_validate(variable) for variable in pods.shutdown_variables(pod)]
    template.env = variables + list(template.env or [])  # type: ignore[arg-type]
    labels = gang.preset_fields("labels", cluster, cluster.queue_priority)
    template.labels = {**(template.labels or {}), **labels} or None
    annotations = gang.preset_fields("annotations", cluster)
    template.annotations = {**(template.annotations or {}), **annotations} or None
    template.scheduler_name = gang.preset_fields("pods", cluster).get("schedulerName")

    return template


def add_variables(template: Any, variables: Iterable[pods.Manifest]) -> None:
    """Add environment variables to the template of a step."""
    added = [m.EnvVar.model_validate(variable) for variable in variables]
    template.env = [*(template.env or []), *added] or None


def set_security_contexts(templates: Iterable[Any]) -> None:
    """Set the security context that the PodSecurity standard `restricted` requires on each template
    that does not set its own."""
    for template in templates:
        if isinstance(template, Container | Script):
            template.security_context = (
                template.security_context
                or m.SecurityContext.model_validate(pods.RESTRICTED_SECURITY)
            )
            template.pod_spec_patch = template.pod_spec_patch or to_json(pods.EXECUTOR_SECURITY)


def placement_fields(pod: PodConfig) -> dict[str, Any]:
    """Return the fields of a template that set node selection, priority, labels and annotations."""
    return {
        "node_selector": pod.node_selector or None,
        "affinity": m.Affinity.model_validate(pods.affinity(pod)) if pod.avoid else None,
        "tolerations": [m.Toleration.model_validate(t) for t in pods.tolerations(pod)] or None,
        "priority_class_name": pod.priority_class or None,
        "labels": pod.labels or None,
        "annotations": pod.annotations or None,
    }


def needs_task_name(definition: Step) -> bool:
    """Return whether the template of a step needs the parameter TASK, either for the keys of its
    output artifacts or for the cache."""
    return hasattr(definition, "REUSE") or any(
        map(is_artifact, definition.Outputs.model_fields.values())
    )


def step_flags(module: str, values: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags that pass `values` to a step in a pod of a job or Deployment.
    Raises ConfigError for unknown or missing inputs."""
    fields = load(module).Inputs.model_fields
    for unknown in values.keys() - fields.keys():
        raise ConfigError(
            f"step {module} has no input {unknown}.{did_you_mean(unknown, set(fields))}"
        )
    for field, info in fields.items():
        if info.is_required() and field not in values:
            raise ConfigError(f"step {module} requires the input {field}: give it a value.")
    texts = {
        field: format_input(values[field]) for field in fields if values.get(field) is not None
    }
    return [quote_argument(f"{flag(field)}={text}") for field, text in texts.items()]
