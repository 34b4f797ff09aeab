"""Validate objects against excerpts of the schemas of custom resources.

    python -m tests.rekindle.blocks.schema TFJob CRD.yaml      updates schemas/TFJob.json

An excerpt has the names of all fields next to the fields that our objects set, and the types and values of the latter.
Like the API server with strict validation, `wrong` rejects unknown fields.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
KEPT = ("type", "enum", "required", "pattern", "maxLength", "x-kubernetes-int-or-string")
Schema = dict[str, Any]


def wrong(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Yield the errors that the API server would report."""
    if schema.get("x-kubernetes-int-or-string"):
        schema = {"type": "string" if isinstance(value, str) else "integer"}
    if "type" in schema and (
        not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        yield f"{path} is {value!r}: it must be of type {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}: it must be one of {schema['enum']}"
    if isinstance(value, dict):
        yield from (f"{path}.{key} is missing" for key in schema.get("required", []) if key not in value)
        for key, each in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if inner is None and "properties" in schema:
                yield f"{path}.{key} is not known"
            else:
                yield from wrong(each, inner or {}, f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from wrong(each, schema.get("items", {}), f"{path}[{index}]")


def excerpt(schema: Schema, value: Any) -> Schema:
    """Return the excerpt of `schema` that applies to `value`."""
    kept = {key: schema[key] for key in KEPT if key in schema}
    if isinstance(value, dict) and "properties" in schema:
        kept["properties"] = {
            key: excerpt(inner, value[key]) if key in value else {} for key, inner in schema["properties"].items()
        }
    elif isinstance(value, dict) and "additionalProperties" in schema:
        kept["additionalProperties"] = _merged(
            [excerpt(schema["additionalProperties"], each) for each in value.values()]
        )
    elif isinstance(value, list) and "items" in schema:
        kept["items"] = _merged([excerpt(schema["items"], each) for each in value])
    return kept


def _merged(schemas: list[Schema]) -> Schema:
    merged: Schema = {}
    for schema in schemas:
        for key, each in schema.items():
            current = merged.get(key)
            merged[key] = _merged([current, each]) if isinstance(current, dict) and isinstance(each, dict) else each
    return merged


def main(kind: str, crd: str) -> None:
    from tests.kinds import kinds

    obj = kinds()[kind].manifest
    versions = yaml.load(Path(crd).read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [
        each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == obj["apiVersion"].rpartition("/")[2]
    ]
    schema["properties"]["metadata"] = {"type": "object"}  # the API server knows it
    text = json.dumps(excerpt(schema, obj), separators=(",", ":"), sort_keys=True)
    (SCHEMAS / f"{kind.replace('/', '-')}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
