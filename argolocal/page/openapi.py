"""Describe the page's JSON API as an OpenAPI 3.1 document. Pydantic generates the schemas, which
are JSON Schemas, from the types of the responses.

Source: spec.openapis.org/oas/v3.1.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

from pydantic import TypeAdapter

from argolocal.common import program
from argolocal.common.checked_names import ObjectName
from argolocal.page.actions.action import Outcome, Plan
from argolocal.page.actions.routes import FORM_TYPE, Actions
from argolocal.page.run_list import STATES, RunList

Document = dict[str, Any]
Schemas = Mapping[type, Document]
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True)
class ErrorAnswer:
    """The response to a failed request. `error`: the error message."""

    error: str


@dataclass(frozen=True)
class Resource:
    """A URL path. The response to a GET request for this path is an object of the type
    `content`."""

    path: str
    title: str
    content: type
    parameters: Mapping[str, str]
    """Query parameters: name → description."""


def describe_api(resources: Sequence[Resource], list_filters: Sequence[str]) -> Document:
    """Return the OpenAPI document of a page. `list_filters`: additional query parameters of the
    list of runs."""
    contents = [RunList, *(resource.content for resource in resources)]
    contents += [Plan, Actions, Outcome, ErrorAnswer]
    schemas, definitions = _make_schemas(contents)

    paths: dict[str, Document] = {
        "/": {"get": _describe_list(schemas, list_filters)},
        "/events": {"get": _describe_events()},
        "/metrics": {"get": _describe_text("Metrics of the runs, for Prometheus", "text/plain")},
        "/openapi.json": {"get": _describe_text("This description", "application/json")},
        "/runs/{run}/actions": {
            "get": _operation("The actions that are possible now", Actions, schemas)
        },
        "/runs/{run}/actions/{action}": _describe_action(schemas),
    }
    for resource in resources:
        parameters = [_query(name, text) for name, text in resource.parameters.items()]
        operation = _operation(resource.title, resource.content, schemas, parameters)
        paths[resource.path] = {"get": operation}

    for path, operations in paths.items():
        parameters = [_path_parameter(name) for name in ("run", "action") if f"{{{name}}}" in path]
        if parameters:
            operations["parameters"] = parameters

    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"The page of {program.name}",
            "version": version("rekindle"),
            "description": (
                "Each address of the page answers with JSON for `Accept: application/json`. The"
                f" token of the home is in the address that `{program.name} ui` prints."
            ),
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": definitions,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _make_schemas(contents: Sequence[type]) -> tuple[Schemas, Document]:
    """Return a schema for each type, and the definitions that these schemas refer to."""
    types = list(dict.fromkeys(contents))
    adapters = [
        (number, "serialization", TypeAdapter(content)) for number, content in enumerate(types)
    ]
    schema_by_key, document = TypeAdapter.json_schemas(cast(Any, adapters), ref_template=REFERENCE)
    schema_by_number = {key[0]: schema for key, schema in schema_by_key.items()}
    schemas = {content: dict(schema_by_number[number]) for number, content in enumerate(types)}
    return schemas, document.get("$defs", {})


def _operation(
    title: str, content: type, schemas: Schemas, parameters: Sequence[Document] = ()
) -> Document:
    """Return the OpenAPI description of the GET request for a URL path."""
    operation: Document = {"summary": title, "responses": _answers(content, schemas)}
    if parameters:
        operation["parameters"] = list(parameters)
    return operation


def _answers(content: type, schemas: Schemas) -> Document:
    return {
        "200": _json_answer("The content of the page", schemas[content]),
        "default": _json_answer("A request that failed", schemas[ErrorAnswer]),
    }


def _json_answer(text: str, schema: Document) -> Document:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _describe_list(schemas: Schemas, filters: Sequence[str]) -> Document:
    parameters = [
        _query("q", "Text that a row contains, in any case"),
        {**_query("state", "State of the runs"), "schema": {"enum": ["", *STATES]}},
        _query("page", "Number of the page, from 1"),
        *(_query(title.lower(), f"{title} of the runs") for title in filters),
    ]
    return _operation("The list of runs, newest first", RunList, schemas, parameters)


def _describe_text(title: str, media_type: str) -> Document:
    answer = {"description": title, "content": {media_type: {"schema": {}}}}
    return {"summary": title, "responses": {"200": answer}}


def _describe_events() -> Document:
    events = _describe_text(
        "Server-sent events: `version` if the list of runs or a run has changed",
        "text/event-stream",
    )
    return {**events, "parameters": [_query("run", "Name of a run (default: the list of runs)")]}


def _describe_action(schemas: Schemas) -> Document:
    values = {"type": "object", "additionalProperties": {"type": "string"}}
    return {
        "get": _operation("The plan of an action, and its fields", Plan, schemas),
        "post": {
            "summary": "Do an action",
            "description": "One value for each field; a field that is missing gets its value.",
            "requestBody": {
                "content": {
                    "application/json": {"schema": values},
                    FORM_TYPE: {"schema": values},
                }
            },
            "responses": _answers(Outcome, schemas),
        },
    }


def _query(name: str, text: str) -> Document:
    return {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}


def _path_parameter(name: str) -> Document:
    schema: Document = {"type": "string"}
    if name == "run":
        schema = {"type": "string", "maxLength": ObjectName.MAX_BYTES}
    return {"name": name, "in": "path", "required": True, "schema": schema}
