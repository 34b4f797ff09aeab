"""A step module as an Argo container template: its Inputs and Outputs are the template's, declared once.

A field is a parameter or an artifact of its own name; an artifact's key in the store is `WORKFLOW/FIELD`, so that
whoever names the field gets what another step wrote, and a training job, which is no Argo step, can take part.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, cast

from hera.workflows import Container, NoneArchiveStrategy, Parameter, RetryStrategy, S3Artifact
from hera.workflows import models as m

from rekindle.blocks import pod as pods
from rekindle.blocks.settings import ClusterConfig, PodName
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import key
from rekindle.step import flag, is_artifact, load, short_name, to_text

NO_CURE = "lastRetry.exitCode not in ['65', '78']"  # wrong data or configuration: rekindle/errors.py


def retries(limit: int, expression: str | None = None) -> RetryStrategy:
    """For evictions (Failed in Argo) and deleted pods (Error) as well; unless `expression` says that it is no use."""
    backoff = m.Backoff(duration="2s", factor=m.IntOrString(root=3), cap="1m")
    return RetryStrategy(limit=limit, retry_policy="Always", backoff=backoff, expression=expression)


def step(module: str, cluster: ClusterConfig, exports: Collection[str] = ()) -> Container:
    """The template that runs the step `module`; the outputs in `exports` become outputs of the workflow."""
    definition, name = load(module), short_name(module)
    pod = cluster.pod(cast(PodName, name))
    args, inputs, outputs = ["-m", "rekindle", "step", module], [], []
    for field, info in definition.Inputs.model_fields.items():
        if is_artifact(info):
            inputs.append(_artifact(field, "inputs"))
            args.append(f"{flag(field)}={{{{inputs.artifacts.{field}.path}}}}")
            continue
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if default is not None or info.is_required():  # there is no text for None: the step's own default holds
            value = Parameter(name=field) if info.is_required() else Parameter(name=field, default=to_text(default))
            inputs.append(value)
            args.append(f"{flag(field)}={{{{inputs.parameters.{field}}}}}")
    for field, info in definition.Outputs.model_fields.items():
        kind = "artifacts" if is_artifact(info) else "parameters"
        args += ["--output", f"{field}={{{{outputs.{kind}.{field}.path}}}}"]
        if is_artifact(info):
            outputs.append(_artifact(field, "outputs"))
        else:
            where = m.ValueFrom(path=f"/tmp/outputs/{field}")
            outputs.append(Parameter(name=field, value_from=where, global_name=field if field in exports else None))
    return Container(
        name=name,
        image=pod.image,
        image_pull_policy="IfNotPresent",
        command=["python"],
        args=args,
        inputs=inputs,
        outputs=outputs,
        env_from=[m.EnvFromSource.model_validate(source) for source in pods.ENVIRONMENT],
        resources=m.ResourceRequirements.model_validate(pods.resources(pod)),
        security_context=m.SecurityContext.model_validate(pods.CONTAINER_SECURITY),
        volumes=[m.Volume.model_validate(volume) for volume in pods.VOLUMES],
        volume_mounts=[m.VolumeMount.model_validate(mount) for mount in pods.MOUNTS],
        node_selector=pod.node_selector or None,
        affinity=m.Affinity.model_validate(pods.affinity(pod)) if pod.avoid else None,
        tolerations=[m.Toleration.model_validate(t) for t in pods.tolerations(pod)] or None,
        priority_class_name=pod.priority_class or None,
        pod_spec_patch=json.dumps(pods.EXECUTOR_SECURITY),
        retry_strategy=retries(cluster.retries, NO_CURE),
        active_deadline_seconds=60 * pod.deadline_minutes,
    )


def _artifact(name: str, direction: str) -> S3Artifact:
    path = f"/tmp/{direction}/{name}"
    return S3Artifact(name=name, path=path, key=key(name), archive=NoneArchiveStrategy())


def command(module: str, values: Mapping[str, Any]) -> list[str]:
    """The flags of a step whose inputs are all known now, for pods that are no Argo steps.

    Raises ConfigError for a value the step does not know, or a required one that is missing.
    """
    fields = load(module).Inputs.model_fields
    for unknown in values.keys() - fields.keys():
        raise ConfigError(f"step {module} has no input {unknown}.{did_you_mean(unknown, set(fields))}")
    for field, info in fields.items():
        if info.is_required() and field not in values:
            raise ConfigError(f"step {module} needs its input {field}: give it a value.")
    return [f"{flag(field)}={to_text(values[field])}" for field in fields if values.get(field) is not None]
