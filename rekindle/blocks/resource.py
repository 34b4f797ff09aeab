"""Resource templates: apply a Kubernetes object and wait for its status, read, scale or delete one.

A condition is a label selector over paths of the object's JSON (grammar:
argolocal/language/selector.py); commas mean AND in `success` and OR in `failure`; `failure` is
evaluated first.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hera.workflows import Parameter, Resource, RetryStrategy
from hera.workflows import models as m

from argolocal.common.json_text import to_json
from rekindle.blocks.container import placement, retries
from rekindle.blocks.manifest.quoting import as_integer, as_word, in_json
from rekindle.blocks.pod_settings import Manifest, resources
from rekindle.blocks.settings import PodConfig
from rekindle.blocks.wiring import to_expression

# condition of a task after the task `scale`: without capacity for all pods, the requests go to
# those that are ready
SCALED = "scale || scale.Failed || scale.Errored"
NUMBER_TAG = re.compile(r'"\{!(.+?)!\}"')


def text(name: str) -> str:
    """Return a tag for the input `name` of a template, as text."""
    return f"{{{{inputs.parameters.{name}}}}}"


def number(name: str) -> str:
    """Return a tag for the input `name` as an integer, for `render`."""
    return integer(to_expression(f"inputs.parameters.{name}"))


def integer(expression: str) -> str:
    """Return a mark for the value of an expression as an integer, for `render`."""
    return f"{{!{expression}!}}"


def render(manifest: Manifest | list[Manifest]) -> str:
    """Return an object, or the operations of a patch, as JSON; the mark of an integer becomes a tag
    without quotes.

    Argo replaces tags before it parses the text, so texts with tags are quoted (`quoting.in_json`).
    The JSON is indented so that its braces do not merge with the braces of tags.
    """
    text = to_json(in_json(manifest), indent=1)
    return NUMBER_TAG.sub(lambda match: as_integer(match[1]), text)


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
    """Return a template that applies `manifest` and waits for the condition `success` or one of
    `failure`.

    An `owned` object is deleted with the workflow. If the pod that waits is lost, its replacement
    applies the unchanged object and waits again: nothing starts twice.
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


def read(
    name: str, kind: str, obj: str, paths: dict[str, str], inputs: tuple[str, ...] = ()
) -> Resource:
    """Return a template that reads fields of an object by JSONPath; they are empty if the object
    does not exist."""
    return Resource(
        name=name,
        action="get",
        flags=[kind, as_word(obj), "--ignore-not-found"],
        inputs=[Parameter(name=field) for field in inputs],
        outputs=[
            Parameter(name=field, value_from=m.ValueFrom(json_path=path))
            for field, path in paths.items()
        ],
        retry_strategy=retries(2),
    )


def scale(name: str, seconds: int) -> Resource:
    """Return a template that gives the Deployment `server` `replicas` pods; it fails if they are
    not ready in time."""
    return Resource(
        name=name,
        action="patch",
        merge_strategy="merge",
        flags=["deployment", as_word(text("server"))],
        manifest=render({"spec": {"replicas": number("replicas")}}),
        success_condition=f"status.readyReplicas == {as_integer('inputs.parameters.replicas')}",
        inputs=[Parameter(name="server"), Parameter(name="replicas")],
        retry_strategy=RetryStrategy(limit=1, retry_policy="OnError"),
        active_deadline_seconds=seconds,
    )


def arguments(template: Resource, values: Mapping[str, str]) -> dict[str, str]:
    """Return the `values` that are inputs of the template."""
    inputs: list[Parameter] = template.inputs or []  # pyright: ignore[reportAssignmentType]
    names = {parameter.name for parameter in inputs}
    return {name: value for name, value in values.items() if name in names}


def delete(name: str, retry: RetryStrategy) -> Resource:
    """Return a template that deletes the object given by the inputs `kind` and `object`, if the
    object exists.

    The deletion is in the foreground: otherwise a new job of the same name would adopt the pods of
    the old job.
    """
    inputs = [Parameter(name="kind"), Parameter(name="object")]
    flags = [text("kind"), text("object"), "--cascade=foreground"]
    return Resource(name=name, action="delete", flags=flags, inputs=inputs, retry_strategy=retry)


def set_pod_settings(templates: Iterable[Any], pod: PodConfig) -> None:
    """Apply the settings of `pod` to resource templates, whose pods run only Argo; a template's own
    settings stay."""
    patch = to_json({"containers": [{"name": "main", "resources": resources(pod)}]})
    for template in templates:
        if isinstance(template, Resource):
            for field, value in {"pod_spec_patch": patch, **placement(pod)}.items():
                setattr(template, field, getattr(template, field) or value)
