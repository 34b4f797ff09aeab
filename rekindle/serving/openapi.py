"""Creates the OpenAPI 3.1 document of a served model, with the schemas of the workload's pydantic
models."""

from typing import Any

from pydantic import BaseModel

from rekindle.release.model_client import DATA_UNTIL_HEADER, SHA256_HEADER, VERSION_HEADER

ERROR_DESCRIPTIONS = {
    400: "not valid HTTP/1.1",
    401: "missing or wrong token",
    404: "unknown model name",
    405: "another method than POST",
    408: "the request took too long to arrive",
    413: "too large: send it in parts",
    422: "invalid request; the error has the location",
    431: "the head of the request is too large",
    500: "the model failed",
    503: (
        "loading, or too many requests are waiting or arriving: try again after Retry-After seconds"
    ),
}
# paths that need no token, which are the paths for probes and Prometheus (network policies limit
# the access), and a page without data
UNAUTHENTICATED_PATHS = ("/health/live", "/health/ready", "/metrics", "/", "/docs")
IDENTITY_HEADERS = {
    VERSION_HEADER: "version of the registered model",
    SHA256_HEADER: "sha256 of the weights that answered",
    DATA_UNTIL_HEADER: "data cut-off of the model; omitted if unknown",
}


_PREDICTIONS_SCHEMA = {
    "type": "object",
    "required": ["predictions"],
    "properties": {
        "predictions": {"type": "array"},
        "warning": {
            "type": "string",
            "description": "a reason to distrust the predictions; omitted if none is known",
        },
    },
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def make_schemas(request_type: type[BaseModel]) -> dict[str, Any]:
    """Return a mapping from names to JSON schemas, for a request (with the name Request) and for
    the models in the request."""
    request_schema = request_type.model_json_schema(ref_template="#/components/schemas/{model}")
    return request_schema.pop("$defs", {}) | {"Request": request_schema}


def make_openapi(
    model_name: str,
    model_version: str,
    example_request: dict[str, Any],
    component_schemas: dict[str, Any],
    needs_token: bool = False,
) -> dict[str, Any]:
    """Return the OpenAPI document of a served model. `needs_token` is True if requests need a
    token."""
    paths = _make_paths(model_name, example_request)
    components: dict[str, Any] = {
        "schemas": {
            **component_schemas,
            "Predictions": _PREDICTIONS_SCHEMA,
            "Error": _ERROR_SCHEMA,
        }
    }
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}

    return {
        "openapi": "3.1.0",
        "info": {"title": model_name, "version": model_version},
        "paths": paths,
        "components": components,
        **({"security": [{"token": []}]} if needs_token else {}),
    }


def _make_paths(model_name: str, example_request: dict[str, Any]) -> dict[str, Any]:
    """Return the operations of the server by path."""
    model_path = f"/v1/models/{model_name}"
    failure_responses = {
        str(http_status): {
            "description": description_text,
            "content": _make_json_content(_make_reference("Error")),
        }
        for http_status, description_text in ERROR_DESCRIPTIONS.items()
    }
    identity_headers = {
        header_name: {"description": description_text, "schema": {"type": "string"}}
        for header_name, description_text in IDENTITY_HEADERS.items()
    }
    success_response = {
        "description": "one prediction per instance, in order",
        "headers": identity_headers,
    }

    predict_operation = {
        "summary": "Predictions for the instances",
        "operationId": "predict",
        "requestBody": {
            "required": True,
            "content": _make_json_content(_make_reference("Request"), example_request),
        },
        "responses": (
            {
                "200": success_response
                | {"content": _make_json_content(_make_reference("Predictions"))}
            }
            | failure_responses
        ),
    }

    status_operation = _make_get_operation(
        "The model, its version and readiness", "the fields of both TensorFlow Serving and KServe"
    )

    paths = {
        f"{model_path}:predict": {"post": predict_operation},
        model_path: status_operation,
        f"{model_path}/example": _make_get_operation(
            "A valid request", "the body of a request that can be posted to :predict"
        ),
        "/health/live": _make_get_operation("The server runs", "for liveness probes"),
        "/health/ready": _make_get_operation(
            "All processes have loaded the model",
            "503 while the model is loading, and while the server is draining",
        ),
        "/metrics": _make_get_operation("Counters and histograms", "in Prometheus' text format"),
    }
    for open_path in paths.keys() & set(UNAUTHENTICATED_PATHS):
        paths[open_path]["get"]["security"] = []

    return paths


def _make_reference(schema_name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{schema_name}"}


def _make_json_content(schema: dict[str, Any], example: object = None) -> dict[str, Any]:
    return {
        "application/json": {"schema": schema} | ({} if example is None else {"example": example})
    }


def _make_get_operation(summary: str, description: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": description}}}}
