"""Build resource templates, which apply a Kubernetes object and wait for its status, or read, scale
or delete an object.

A condition is a label selector over paths of the object's JSON (grammar:
argolocal/language/selector.py). An object has succeeded if all parts of `success` hold, and has
failed if one part of `failure` holds; Argo evaluates `failure` first.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hera.workflows import Parameter, Resource, RetryStrategy
from hera.workflows import models as m

from argolocal.common.json_text import to_json
from rekindle.blocks.container import placement_fields, retries
from rekindle.blocks.manifest.quoting import integer_tag, quote_in_json, quote_word
from rekindle.blocks.pod_settings import Manifest, resources
from rekindle.blocks.settings import PodConfig
from rekindle.blocks.wiring import to_expression

# `depends` of the tasks after `scale`. They also run if `scale` fails, because the ready pods can
# serve the requests if the cluster has no capacity for all pods.
AFTER_SCALE = "scale || scale.Failed || scale.Errored"
NUMBER_TAG = re.compile(r'"\{!(.+?)!\}"')


def text_tag(name: str) -> str:
    """Return the template tag that Argo replaces by the text of a template's input `name`."""
    return f"{{{{inputs.parameters.{name}}}}}"


def integer_input(name: str) -> str:
    """Return a placeholder for the integer in the input `name`; `render` replaces the placeholder
    by a template tag."""
    return integer_placeholder(to_expression(f"inputs.parameters.{name}"))


def integer_placeholder(expression: str) -> str:
    """Return a placeholder for an expression with an integer value; `render` replaces the
    placeholder by a template tag."""
    return f"{{!{expression}!}}"


def render(manifest: Manifest | list[Manifest]) -> str:
    """Return an object, or the operations of a patch, as JSON; placeholders of integers become
    template tags without quotes.

    Argo replaces template tags before it parses the JSON, so texts with tags are quoted
    (`quoting.in_json`). The JSON is indented so that its braces do not merge with the braces of
    tags.
    """
    text = to_json(quote_in_json(manifest), indent=1)
    return NUMBER_TAG.sub(lambda match: integer_tag(match[1]), text)


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

    If `owned` is True, Kubernetes deletes the object together with the workflow. If the waiting pod
    is lost, a new pod applies the same object again, which changes nothing, and continues to wait.
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
    name: str, kind: str, object_name: str, paths: dict[str, str], inputs: tuple[str, ...] = ()
) -> Resource:
    """Return a template whose outputs are fields of an object, selected by JSONPath. The outputs
    are empty if the object does not exist."""
    return Resource(
        name=name,
        action="get",
        flags=[kind, quote_word(object_name), "--ignore-not-found"],
        inputs=[Parameter(name=field) for field in inputs],
        outputs=[
            Parameter(name=field, value_from=m.ValueFrom(json_path=path))
            for field, path in paths.items()
        ],
        retry_strategy=retries(2),
    )


def scale_template(name: str, seconds: int) -> Resource:
    """Return a template that scales the Deployment in its input `server` to `replicas` pods, and
    fails if they are not ready within `seconds`."""
    return Resource(
        name=name,
        action="patch",
        merge_strategy="merge",
        flags=["deployment", quote_word(text_tag("server"))],
        manifest=render({"spec": {"replicas": integer_input("replicas")}}),
        success_condition=f"status.readyReplicas == {integer_tag('inputs.parameters.replicas')}",
        inputs=[Parameter(name="server"), Parameter(name="replicas")],
        retry_strategy=RetryStrategy(limit=1, retry_policy="OnError"),
        active_deadline_seconds=seconds,
    )


def select_arguments(template: Resource, values: Mapping[str, str]) -> dict[str, str]:
    """Return those of `values` whose names are inputs of the template."""
    inputs: list[Parameter] = template.inputs or []  # pyright: ignore[reportAssignmentType]
    names = {parameter.name for parameter in inputs}
    return {name: value for name, value in values.items() if name in names}


def delete_template(name: str, retry: RetryStrategy) -> Resource:
    """Return a template that deletes the object given by the inputs `kind` and `object`, if the
    object exists.

    The object's dependents are deleted first (--cascade=foreground), because otherwise a new job of
    the same name would adopt the pods of the old job.
    """
    inputs = [Parameter(name="kind"), Parameter(name="object")]
    flags = [text_tag("kind"), text_tag("object"), "--cascade=foreground"]
    return Resource(name=name, action="delete", flags=flags, inputs=inputs, retry_strategy=retry)


def set_pod_settings(templates: Iterable[Any], pod: PodConfig) -> None:
    """Apply the settings of `pod` to resource templates, whose pods run only Argo's executor; keep
    the settings that a template already has."""
    patch = to_json({"containers": [{"name": "main", "resources": resources(pod)}]})
    for template in templates:
        if isinstance(template, Resource):
            for field, value in {"pod_spec_patch": patch, **placement_fields(pod)}.items():
                setattr(template, field, getattr(template, field) or value)
