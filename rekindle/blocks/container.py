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
    ContainerSet,
    Data,
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
from rekindle.errors import ConfigError, suggest_similar
from rekindle.keys import TASK_PARAMETER, key, reuse_tag
from rekindle.step import Step, format_flag, format_parameter, is_artifact, load_step_module

RETRY_CONDITION = f"lastRetry.exitCode not in {[str(code) for code in exit_codes.PERMANENT_ERRORS]}"


def retries(limit: int, expression: str | None = None, factor: int = 3) -> RetryStrategy:
    """Return a retry strategy that retries a pod up to `limit` times if `expression` is true (None:
    always). Pods in the phases Failed (for example evicted pods) and Error (deleted pods) are
    retried."""
    backoff = m.Backoff(duration="2s", factor=m.IntOrString(root=factor), cap="1m")
    return RetryStrategy(limit=limit, retry_policy="Always", backoff=backoff, expression=expression)


def retry_watcher(max_retries: int) -> RetryStrategy:
    """Return the retry strategy of a pod that watches a job. After a retry, the new pod continues
    to watch the same job.

    If the job itself has failed, the watching pod is not retried, because the job has already used
    up its own retries. If the API server rejects the watching pod's request, the pod is retried
    `max_retries` times.
    """
    unavailable_pattern = (
        "'failed calling webhook|connection re|imeout|EOF|unavailable|nternal error'"
    )
    is_transient_failure = (
        "!(lastRetry.message contains 'no more retries') || lastRetry.message matches"
        f" {unavailable_pattern}"
    )
    job_is_healthy = (
        f"!(lastRetry.message contains 'failure condition') && (asInt(retries) < {max_retries} ||"
        f" {is_transient_failure})"
    )
    backoff = m.Backoff(duration="10s")

    # set a limit, because Argo ignores the backoff of a retry strategy without a limit
    return RetryStrategy(
        limit=1_000_000, retry_policy="Always", backoff=backoff, expression=job_is_healthy
    )


def step_template(
    template_name: str,
    step_module: str,
    cluster: ClusterConfig,
    pod_config: PodConfig,
    *,
    in_loop: bool = False,
) -> Container:
    """Return the template `template_name` that runs the step `step_module`; with `in_loop`, the
    template is for tasks in loops."""
    step_definition = load_step_module(step_module)
    template_inputs, input_flags = _build_inputs(step_definition)
    template_outputs, output_flags = _build_outputs(step_definition, in_loop)
    python_arguments = ["-m", "rekindle", "step", step_module, *input_flags, *output_flags]

    if needs_task_name(step_definition):
        template_inputs.append(Parameter(name=TASK_PARAMETER))

    environment_variables: list[Any] = []
    if hasattr(step_definition, "REUSE") and not in_loop:
        cache_reference = f"{{{{workflow.name}}}}/{{{{inputs.parameters.{TASK_PARAMETER}}}}}"
        python_arguments += [
            quote_argument(f"--entry={cache_reference}"),
            quote_argument(f"--reuse={reuse_tag()}"),
        ]
        environment_variables = [
            m.EnvVar.model_validate(variable) for variable in pods.image_variables(pod_config.image)
        ]

    return Container(
        name=template_name,
        image=pod_config.image,
        image_pull_policy="IfNotPresent",
        command=["python"],
        args=python_arguments,
        inputs=template_inputs,
        outputs=template_outputs,
        env=environment_variables or None,
        env_from=[
            m.EnvFromSource.model_validate(environment_source)
            for environment_source in pods.environment_sources()
        ],
        resources=m.ResourceRequirements.model_validate(pods.resource_requirements(pod_config)),
        security_context=m.SecurityContext.model_validate(pods.CONTAINER_SECURITY),
        volumes=[m.Volume.model_validate(volume) for volume in pods.tmp_volumes(pod_config)],
        volume_mounts=[m.VolumeMount.model_validate(mount) for mount in pods.TMP_MOUNTS],
        **placement_fields(pod_config),
        pod_spec_patch=to_json(pods.EXECUTOR_SECURITY),
        retry_strategy=retries(cluster.retries, RETRY_CONDITION),
        active_deadline_seconds=60 * pod_config.deadline_minutes,
    )


def _build_inputs(step_definition: Step) -> tuple[list[Any], list[str]]:
    """Return the inputs of a step's template, and the command-line flags that pass them to the
    step."""
    template_inputs: list[Any] = []
    input_flags: list[str] = []

    for field_name, field_info in step_definition.Inputs.model_fields.items():
        if is_artifact(field_info):
            template_inputs.append(Artifact(name=field_name, path=f"/tmp/inputs/{field_name}"))
            input_flags.append(
                f"{format_flag(field_name)}={{{{inputs.artifacts.{field_name}.path}}}}"
            )
            continue

        parameter = Parameter(name=field_name)
        if not field_info.is_required():
            default_value = field_info.get_default(call_default_factory=True)
            # text cannot express None: if the default of an input is None, omit its flag, so that
            # the step uses the default
            if default_value is None:
                continue
            parameter.default = format_parameter(default_value)

        template_inputs.append(parameter)
        input_flags.append(
            quote_argument(f"{format_flag(field_name)}={{{{inputs.parameters.{field_name}}}}}")
        )

    return template_inputs, input_flags


def _build_outputs(step_definition: Step, in_loop: bool) -> tuple[list[Any], list[str]]:
    """Return the outputs of a step's template, and the command-line flags that tell the step where
    to write them."""
    template_outputs: list[Any] = []
    output_flags: list[str] = []

    for field_name, field_info in step_definition.Outputs.model_fields.items():
        output_kind = "artifacts" if is_artifact(field_info) else "parameters"
        output_flags += [
            "--output",
            f"{field_name}={{{{outputs.{output_kind}.{field_name}.path}}}}",
        ]
        template_outputs.append(_build_output(field_name, field_info, in_loop))

    return template_outputs, output_flags


def _build_output(
    output_name: str, output_field: FieldInfo, in_loop: bool
) -> Parameter | S3Artifact:
    """Return the output of a template for a field of the step. In a loop, each pod stores its
    output artifact under its own object key."""
    path = f"/tmp/outputs/{output_name}"
    if not is_artifact(output_field):
        return Parameter(name=output_name, value_from=m.ValueFrom(path=path))

    file = f"{{{{pod.name}}}}/{output_name}" if in_loop else output_name
    object_key = key(f"{{{{inputs.parameters.{TASK_PARAMETER}}}}}", file)
    return S3Artifact(name=output_name, path=path, key=object_key, archive=NoneArchiveStrategy())


def set_worker_settings(
    template: Container, cluster: ClusterConfig, pod_config: PodConfig
) -> Container:
    """Set the grace period, preemption notices and gang scheduler of `template`, whose step trains
    in its own pod, as for the workers of a training job."""
    pod_spec_patch = pods.EXECUTOR_SECURITY | {
        "terminationGracePeriodSeconds": pod_config.grace_seconds
    }
    template.pod_spec_patch = to_json(pod_spec_patch)
    environment_variables = [
        m.EnvVar.model_validate(variable) for variable in pods.shutdown_variables(pod_config)
    ]
    template.env = environment_variables + list(template.env or [])  # type: ignore[arg-type]
    annotations = gang.preset_fields("annotations", cluster)
    template.annotations = {**(template.annotations or {}), **annotations} or None
    template.scheduler_name = gang.preset_fields("pods", cluster).get("schedulerName")

    return template


def set_queue(
    templates: Iterable[Any], cluster: ClusterConfig, pod_kinds: Mapping[str, str]
) -> None:
    """Let the pods of `templates` wait in the queue of Kueue, each on its own, except the pods of
    the kinds in cluster.unqueued. `pod_kinds`: kind of pod, by name of the template.

    The pods of resource templates never wait in the queue: they only watch an object, so a job
    could wait for the quota that its own watcher uses. Daemons never wait in the queue either,
    because the steps that need a daemon could wait for the quota that the daemon uses.
    """
    queue_labels = gang.preset_fields("labels", cluster, cluster.queue_priority)
    if not queue_labels:
        return

    for template in templates:
        has_own_pod = isinstance(template, Container | Script | ContainerSet | Data)
        is_unqueued = template.daemon or pod_kinds.get(template.name) in cluster.unqueued
        if has_own_pod and not is_unqueued:
            template.labels = {**queue_labels, **(template.labels or {})}


def add_variables(template: Any, variable_manifests: Iterable[pods.Manifest]) -> None:
    """Add environment variables to the template of a step."""
    environment_variables = [m.EnvVar.model_validate(variable) for variable in variable_manifests]
    template.env = [*(template.env or []), *environment_variables] or None


def set_security_contexts(templates: Iterable[Any]) -> None:
    """Set the security context that the PodSecurity standard `restricted` requires on each template
    without a security context."""
    for template in templates:
        if isinstance(template, Container | Script):
            template.security_context = (
                template.security_context
                or m.SecurityContext.model_validate(pods.RESTRICTED_SECURITY)
            )
            template.pod_spec_patch = template.pod_spec_patch or to_json(pods.EXECUTOR_SECURITY)


def placement_fields(pod_config: PodConfig) -> dict[str, Any]:
    """Return the fields of a template that set node selection, priority, labels and annotations."""
    return {
        "node_selector": pod_config.node_selector or None,
        "affinity": m.Affinity.model_validate(pods.node_affinity(pod_config))
        if pod_config.avoid
        else None,
        "tolerations": [
            m.Toleration.model_validate(toleration)
            for toleration in pods.pod_tolerations(pod_config)
        ]
        or None,
        "priority_class_name": pod_config.priority_class or None,
        "labels": pod_config.labels or None,
        "annotations": pod_config.annotations or None,
    }


def needs_task_name(step_definition: Step) -> bool:
    """Return whether the template of a step needs the parameter TASK, either for the keys of its
    output artifacts or for the cache."""
    return hasattr(step_definition, "REUSE") or any(
        map(is_artifact, step_definition.Outputs.model_fields.values())
    )


def step_flags(step_module: str, input_values: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags that pass `input_values` to a step in a pod of a job or
    Deployment. Raises ConfigError for unknown or missing inputs."""
    input_fields = load_step_module(step_module).Inputs.model_fields
    for unknown_input in input_values.keys() - input_fields.keys():
        raise ConfigError(
            f"step {step_module} has no input"
            f" {unknown_input}.{suggest_similar(unknown_input, set(input_fields))}"
        )
    for input_name, input_field in input_fields.items():
        if input_field.is_required() and input_name not in input_values:
            raise ConfigError(
                f"step {step_module} requires the input {input_name}: give it a value."
            )
    input_texts = {
        input_name: format_input(input_values[input_name])
        for input_name in input_fields
        if input_values.get(input_name) is not None
    }
    return [
        quote_argument(f"{format_flag(input_name)}={text}")
        for input_name, text in input_texts.items()
    ]
