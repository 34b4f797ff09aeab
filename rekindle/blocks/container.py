"""A step module as an Argo container template.

Each field of its Inputs and Outputs becomes a parameter or artifact of the same name. Several tasks
share a template: the key of an output artifact contains the task's name (the parameter TASK) and,
in a loop, the pod's name.
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
from rekindle.blocks.manifest.quoting import in_argument, input_text
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import TASK, key, reuse
from rekindle.step import Step, flag, is_artifact, load, to_text

RETRY_CONDITION = f"lastRetry.exitCode not in {[str(code) for code in exit_codes.PERMANENT]}"


def retries(limit: int, expression: str | None = None, factor: int = 3) -> RetryStrategy:
    """Return a strategy to retry while `expression` holds, also after evictions (Failed) and
    deletions (Error)."""
    backoff = m.Backoff(duration="2s", factor=m.IntOrString(root=factor), cap="1m")
    return RetryStrategy(limit=limit, retry_policy="Always", backoff=backoff, expression=expression)


def retry_watcher(limit: int) -> RetryStrategy:
    """Return a strategy to restart the pod that watches a job until the job fails: a new pod finds
    the job again.

    A failed job is not retried, because it has used its own retries. A request that the API server
    rejects permanently is retried `limit` times.
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

    # Argo applies the backoff only if the strategy has a limit
    return RetryStrategy(
        limit=1_000_000, retry_policy="Always", backoff=backoff, expression=job_is_healthy
    )


def container(
    name: str, module: str, cluster: ClusterConfig, pod: PodConfig, *, in_loop: bool = False
) -> Container:
    """Return the template `name` that runs the step `module`; `in_loop`: its tasks are in loops."""
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
            # None cannot be passed as text: the flag is left out, and the step uses its default
            if default is None:
                continue
            parameter.default = to_text(default)

        inputs.append(parameter)
        args.append(in_argument(f"{flag(field)}={{{{inputs.parameters.{field}}}}}"))

    for field, info in definition.Outputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        args += ["--output", f"{field}={{{{outputs.{kind}.{field}.path}}}}"]
        outputs.append(_output(field, info, in_loop))

    if needs_task_name(definition):
        inputs.append(Parameter(name=TASK))

    env: list[Any] = []
    if hasattr(definition, "REUSE") and not in_loop:
        entry = f"{{{{workflow.name}}}}/{{{{inputs.parameters.{TASK}}}}}"
        args += [in_argument(f"--entry={entry}"), in_argument(f"--reuse={reuse()}")]
        env = [m.EnvVar.model_validate(variable) for variable in pods.image_digest(pod.image)]

    return Container(
        name=name,
        image=pod.image,
        image_pull_policy="IfNotPresent",
        command=["python"],
        args=args,
        inputs=inputs,
        outputs=outputs,
        env=env or None,
        env_from=[m.EnvFromSource.model_validate(source) for source in pods.environment()],
        resources=m.ResourceRequirements.model_validate(pods.resources(pod)),
        security_context=m.SecurityContext.model_validate(pods.CONTAINER_SECURITY),
        volumes=[m.Volume.model_validate(volume) for volume in pods.volumes(pod)],
        volume_mounts=[m.VolumeMount.model_validate(mount) for mount in pods.MOUNTS],
        **placement(pod),
        pod_spec_patch=to_json(pods.EXECUTOR_SECURITY),
        retry_strategy=retries(cluster.retries, RETRY_CONDITION),
        active_deadline_seconds=60 * pod.deadline_minutes,
    )


def _output(field: str, info: FieldInfo, in_loop: bool) -> Parameter | S3Artifact:
    """Return an output of a template; in a loop, the pods store their artifacts separately."""
    path = f"/tmp/outputs/{field}"
    if not is_artifact(info):
        return Parameter(name=field, value_from=m.ValueFrom(path=path))

    file = f"{{{{pod.name}}}}/{field}" if in_loop else field
    object_key = key(f"{{{{inputs.parameters.{TASK}}}}}", file)
    return S3Artifact(name=field, path=path, key=object_key, archive=NoneArchiveStrategy())


def as_worker(template: Container, cluster: ClusterConfig, pod: PodConfig) -> Container:
    """Give a step that trains the grace period, the notices and the queue of the workers of a
    job."""
    patch = pods.EXECUTOR_SECURITY | {"terminationGracePeriodSeconds": pod.grace_seconds}
    template.pod_spec_patch = to_json(patch)
    variables = [m.EnvVar.model_validate(variable) for variable in pods.shutdown_variables(pod)]
    template.env = variables + list(template.env or [])  # type: ignore[arg-type]
    template.labels = (template.labels or {}) | gang.fields(
        "labels", cluster, cluster.queue_priority
    ) or None
    template.annotations = (template.annotations or {}) | gang.fields(
        "annotations", cluster
    ) or None
    template.scheduler_name = gang.fields("pods", cluster).get("schedulerName")

    return template


def restrict(templates: Iterable[Any]) -> None:
    """Give plain Hera templates the security contexts that PodSecurity `restricted` requires,
    unless already set."""
    for template in templates:
        if isinstance(template, Container | Script):
            template.security_context = (
                template.security_context or m.SecurityContext.model_validate(pods.RESTRICTED)
            )
            template.pod_spec_patch = template.pod_spec_patch or to_json(pods.EXECUTOR_SECURITY)


def placement(pod: PodConfig) -> dict[str, Any]:
    """Return node selection, priority, labels and annotations of a template's pods."""
    return {
        "node_selector": pod.node_selector or None,
        "affinity": m.Affinity.model_validate(pods.affinity(pod)) if pod.avoid else None,
        "tolerations": [m.Toleration.model_validate(t) for t in pods.tolerations(pod)] or None,
        "priority_class_name": pod.priority_class or None,
        "labels": pod.labels or None,
        "annotations": pod.annotations or None,
    }


def needs_task_name(definition: Step) -> bool:
    """Return whether the step has output artifacts, whose keys contain the task's name, or may be
    cached."""
    return hasattr(definition, "REUSE") or any(
        map(is_artifact, definition.Outputs.model_fields.values())
    )


def command(module: str, values: Mapping[str, Any]) -> list[str]:
    """Return the flags of a step for a pod not started by Argo. Raises ConfigError for unknown or
    missing inputs."""
    fields = load(module).Inputs.model_fields
    for unknown in values.keys() - fields.keys():
        raise ConfigError(
            f"step {module} has no input {unknown}.{did_you_mean(unknown, set(fields))}"
        )
    for field, info in fields.items():
        if info.is_required() and field not in values:
            raise ConfigError(f"step {module} requires the input {field}: give it a value.")
    texts = {field: input_text(values[field]) for field in fields if values.get(field) is not None}
    return [in_argument(f"{flag(field)}={text}") for field, text in texts.items()]
