"""Build resource templates, which apply a Kubernetes object and wait for its status, or read, scale
or delete an object.

A condition on an object is a label selector whose labels are paths in the object's JSON (grammar:
argolocal/language/selector.py). An object has succeeded if all requirements of `success` hold, and
has failed if one requirement of `failure` holds; Argo evaluates `failure` first.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hera.workflows import Parameter, Resource, RetryStrategy
from hera.workflows import models as m

from argolocal.common.json_text import to_json
from rekindle.blocks.container import placement_fields, retries
from rekindle.blocks.manifest.quoting import integer_tag, quote_in_json, quote_word
from rekindle.blocks.pod_settings import Manifest, resource_requirements
from rekindle.blocks.settings import PodConfig
from rekindle.blocks.wiring import to_expression

# `depends` of the tasks after `scale`. The tasks after `scale` also run if `scale` fails, because
# the ready pods can serve the requests if the cluster has no capacity for all pods.
AFTER_SCALE_CONDITION = "scale || scale.Failed || scale.Errored"
NUMBER_TAG = re.compile(r'"\{!(.+?)!\}"')


def text_tag(input_name: str) -> str:
    """Return the template tag that Argo replaces by the text of a template's input `input_name`."""
    return f"{{{{inputs.parameters.{input_name}}}}}"


def integer_input(input_name: str) -> str:
    """Return a placeholder for the integer in the input `input_name`; `render` replaces the
    placeholder by a template tag."""
    return integer_placeholder(to_expression(f"inputs.parameters.{input_name}"))


def integer_placeholder(expression: str) -> str:
    """Return a placeholder for an expression with an integer value; `render` replaces the
    placeholder by a template tag."""
    return f"{{!{expression}!}}"


def render(manifest_or_patch: Manifest | list[Manifest]) -> str:
    """Return an object, or the operations of a patch, as JSON. Placeholders of integers become
    template tags without quotes.

    Argo replaces template tags before it parses the JSON, so texts with tags are quoted
    (`quoting.in_json`). The JSON is indented so that its braces do not merge with the braces of
    tags.
    """
    manifest_text = to_json(quote_in_json(manifest_or_patch), indent=1)
    return NUMBER_TAG.sub(lambda match: integer_tag(match[1]), manifest_text)


def apply(
    name: str,
    manifest: Manifest,
    *,
    inputs: tuple[str, ...] = (),
    success: str | None = None,
    failure: tuple[str, ...] = (),
    owned: bool = False,
    flags: list[str] | None = None,
    retry: RetryStrategy,
) -> Resource:
    """Return a template that applies `manifest` and waits until the condition `success` or one of
    the conditions `failure` holds.

    If `owned` is True, Kubernetes deletes the applied object together with the workflow. If the
    waiting pod is lost, a new pod applies the same object again, which changes nothing, and
    continues to wait.
    """
    return Resource(
        name=name,
        action="apply",
        manifest=render(manifest),
        flags=flags,
        inputs=[Parameter(name=name) for name in inputs],
        success_condition=success,
        failure_condition=",".join(failure) or None,
        set_owner_reference=owned or None,
        retry_strategy=retry,
    )


def read_template(
    name: str,
    object_kind: str,
    object_name: str,
    json_paths: dict[str, str],
    input_names: tuple[str, ...] = (),
) -> Resource:
    """Return a template that reads an object. The outputs of the template are the fields at
    `json_paths` (JSONPath by output name), and are empty if the object does not exist."""
    return Resource(
        name=name,
        action="get",
        flags=[object_kind, quote_word(object_name), "--ignore-not-found"],
        inputs=[Parameter(name=field_name) for field_name in input_names],
        outputs=[
            Parameter(name=field_name, value_from=m.ValueFrom(json_path=path))
            for field_name, path in json_paths.items()
        ],
        retry_strategy=retries(2),
    )


def scale_template(name: str, timeout_seconds: int) -> Resource:
    """Return a template that scales the Deployment in its input `server` to `replicas` pods, and
    fails if they are not ready within `timeout_seconds`."""
    return Resource(
        name=name,
        action="patch",
        merge_strategy="merge",
        flags=["deployment", quote_word(text_tag("server"))],
        manifest=render({"spec": {"replicas": integer_input("replicas")}}),
        success_condition=f"status.readyReplicas == {integer_tag('inputs.parameters.replicas')}",
        inputs=[Parameter(name="server"), Parameter(name="replicas")],
        retry_strategy=RetryStrategy(limit=1, retry_policy="OnError"),
        active_deadline_seconds=timeout_seconds,
    )


def select_input_arguments(
    template: Resource, argument_values: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments in `argument_values` that are inputs of the template."""
    template_inputs: list[Parameter] = template.inputs or []  # pyright: ignore[reportAssignmentType]
    input_names = {parameter.name for parameter in template_inputs}
    return {name: value for name, value in argument_values.items() if name in input_names}


def delete_template(name: str, retry_strategy: RetryStrategy) -> Resource:
    """Return a template that deletes the object given by the inputs `kind` and `object`, if the
    object exists.

    The objects that the deleted object owns are deleted first (--cascade=foreground), because
    otherwise a new job of the same name would adopt the pods of the old job.
    """
    template_inputs = [Parameter(name="kind"), Parameter(name="object")]
    kubectl_flags = [text_tag("kind"), text_tag("object"), "--cascade=foreground"]
    return Resource(
        name=name,
        action="delete",
        flags=kubectl_flags,
        inputs=template_inputs,
        retry_strategy=retry_strategy,
    )


def set_pod_settings(templates: Iterable[Any], pod_config: PodConfig) -> None:
    """Apply the settings of `pod_config` to the resource templates among `templates`: their pods
    run only Argo's executor. Settings that a template already has are kept."""
    pod_spec_patch = to_json(
        {"containers": [{"name": "main", "resources": resource_requirements(pod_config)}]}
    )
    for template in templates:
        if isinstance(template, Resource):
            for field_name, value in {
                "pod_spec_patch": pod_spec_patch,
                **placement_fields(pod_config),
            }.items():
                setattr(template, field_name, getattr(template, field_name) or value)
