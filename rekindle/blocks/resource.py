"""Resource templates: apply a Kubernetes object and wait for its status, or delete one.

A condition is a label selector over paths of the object's JSON (grammar: argolocal/language/selector.py);
commas mean AND in `success` and OR in `failure`, and failure is looked at first.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hera.workflows import Parameter, Resource, RetryStrategy

from rekindle.blocks.container import placement
from rekindle.blocks.pod import Manifest, resources
from rekindle.blocks.settings import PodConfig

NUMBER = re.compile(r'"\{\{!(.+?)\}\}"')


def text(name: str) -> str:
    """The input `name` of a template as text."""
    return f"{{{{inputs.parameters.{name}}}}}"


def number(name: str) -> str:
    """The input `name` as a number, for `render`."""
    return f"{{{{!inputs.parameters.{name}}}}}"


def render(manifest: Manifest | list[Manifest]) -> str:
    """The object, or the operations of a patch, as JSON, which is YAML; `{{!tag}}` marks a number and loses its quotes.

    Indented, so that the braces of JSON and those of tags stay apart. Argo fills tags in as text before it parses:
    only values that need no escaping may be given by tag.
    """
    return NUMBER.sub(r"{{\1}}", json.dumps(manifest, indent=1))


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
    """Apply `manifest` and wait for `success` or one of `failure`; an `owned` object goes when the workflow does.

    Applied again after its pod was lost, the object is found as it is and waited for: nothing is started twice.
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
    """Of `values`, those that the template has an input for."""
    inputs: list[Parameter] = template.inputs or []  # pyright: ignore[reportAssignmentType]
    names = {parameter.name for parameter in inputs}
    return {name: value for name, value in values.items() if name in names}


def delete(name: str, retry: RetryStrategy) -> Resource:
    """Delete the object given by the inputs `kind` and `object`, if it is there.

    In the foreground: a job of the same name, made while the old one's pods linger, would take them for its own.
    """
    inputs = [Parameter(name="kind"), Parameter(name="object")]
    flags = [text("kind"), text("object"), "--cascade=foreground"]
    return Resource(name=name, action="delete", flags=flags, inputs=inputs, retry_strategy=retry)


def equip(templates: Iterable[Any], pod: PodConfig) -> None:
    """Give `pod` to the resource templates, in whose pods only Argo itself runs; what they have of it, they keep."""
    patch = json.dumps({"containers": [{"name": "main", "resources": resources(pod)}]})
    for template in templates:
        if isinstance(template, Resource):
            for field, value in {"pod_spec_patch": patch, **placement(pod)}.items():
                setattr(template, field, getattr(template, field) or value)
