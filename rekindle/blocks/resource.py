"""Resource templates: apply a Kubernetes object and wait for its status, or delete one.

A condition is a label selector over paths of the object's JSON (grammar: argolocal/language/selector.py);
commas mean AND in `success` and OR in `failure`; `failure` is evaluated first.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hera.workflows import Parameter, Resource, RetryStrategy

from rekindle.blocks.container import placement
from rekindle.blocks.pod import Manifest, resources
from rekindle.blocks.settings import PodConfig

NUMBER_TAG = re.compile(r'"\{\{!(.+?)\}\}"')


def text(name: str) -> str:
    """Return a tag for the input `name` of a template, as text."""
    return f"{{{{inputs.parameters.{name}}}}}"


def number(name: str) -> str:
    """Return a tag for the input `name` as a number, for `render`."""
    return f"{{{{!inputs.parameters.{name}}}}}"


def render(manifest: Manifest | list[Manifest]) -> str:
    """Return an object, or the operations of a patch, as JSON; `{{!tag}}` marks a number, and loses its quotes.

    The JSON is indented so that its braces do not merge with the braces of tags. Argo replaces tags before it parses
    the text: values of tags must not need escaping.
    """
    return NUMBER_TAG.sub(r"{{\1}}", json.dumps(manifest, indent=1))


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
    """Return a template that applies `manifest` and waits for the condition `success` or one of `failure`.

    An `owned` object is deleted with the workflow. If the pod that waits is lost, its replacement applies the unchanged
    object and waits again: nothing starts twice.
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


def arguments(template: Resource, values: Mapping[str, str]) -> dict[str, str]:
    """Return the `values` that are inputs of the template."""
    inputs: list[Parameter] = template.inputs or []  # pyright: ignore[reportAssignmentType]
    names = {parameter.name for parameter in inputs}
    return {name: value for name, value in values.items() if name in names}


def delete(name: str, retry: RetryStrategy) -> Resource:
    """Return a template that deletes the object given by the inputs `kind` and `object`, if the object exists.

    The deletion is in the foreground: otherwise a new job of the same name would adopt the pods of the old job.
    """
    inputs = [Parameter(name="kind"), Parameter(name="object")]
    flags = [text("kind"), text("object"), "--cascade=foreground"]
    return Resource(name=name, action="delete", flags=flags, inputs=inputs, retry_strategy=retry)


def set_pod_settings(templates: Iterable[Any], pod: PodConfig) -> None:
    """Apply the settings of `pod` to resource templates, whose pods run only Argo; a template's own settings stay."""
    patch = json.dumps({"containers": [{"name": "main", "resources": resources(pod)}]})
    for template in templates:
        if isinstance(template, Resource):
            for field, value in {"pod_spec_patch": patch, **placement(pod)}.items():
                setattr(template, field, getattr(template, field) or value)
