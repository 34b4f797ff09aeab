"""Validate objects against excerpts of the schemas of Kubernetes and of custom resources.

    # writes tests/schemas/KIND-GROUP-VERSION.json for every rendered kind
    python -m tests.schema FILE...

An excerpt is a JSON schema without descriptions: it has the names of all fields next to the fields
that our objects set, and the types and limits of the fields that our objects set. In an excerpt, an
object field that the rendered objects do not set has the schema `false`.

FILE is the swagger.json of Kubernetes or a CustomResourceDefinition. All sources have the Apache
License 2.0:
  k8s.io/kubernetes 1.34.4                     api/openapi-spec/swagger.json
  github.com/argoproj/argo-workflows 3.7.3     manifests/base/crds/full/
  github.com/kubeflow/training-operator 1.9.3  manifests/base/crds/
  github.com/kubeflow/trainer 2.3.0            manifests/base/crds/
  sigs.k8s.io/jobset 0.12.0                    config/components/crd/bases/
  sigs.k8s.io/gateway-api 1.4.0                config/crd/standard/
  github.com/prometheus-operator 0.93.0        example/prometheus-operator-crd/
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
LIMITS = (
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "required",
)
ANY = "x-kubernetes-preserve-unknown-fields"
DRAFT_URL = "http://json-schema.org/draft-07/schema#"
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
Schema = dict[str, Any]


def schema_of(manifest: dict[str, Any]) -> Schema:
    """Return the excerpt of the schema for the kind of an object."""
    return json.loads((SCHEMAS / file_name(manifest["apiVersion"], manifest["kind"])).read_text())


def file_name(api: str, kind: str) -> str:
    """Return the name of the file by which kubeconform finds a schema:
    {{.ResourceKind}}{{.KindSuffix}}.json."""
    api_group, _, version = api.rpartition("/")
    return (
        "-".join(part.lower() for part in (kind, api_group.partition(".")[0], version) if part)
        + ".json"
    )


def find_errors(value: Any, schema: Schema | bool, path: str = "") -> Iterator[str]:
    """Yield the errors that the API server would report, with strict validation of fields."""
    if isinstance(schema, bool):
        yield f"{path} is not in the excerpt: run python -m tests.schema"
        return

    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]

    boolean = isinstance(value, bool)
    if types and not any(
        isinstance(value, TYPES[each]) and boolean == (each == "boolean") for each in types
    ):
        yield f"{path} is {value!r}: it must be of type {' or '.join(types)}"
        return

    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}: it must be one of {schema['enum']}"

    if isinstance(value, dict):
        yield from (
            f"{path}.{key} is missing" for key in schema.get("required", []) if key not in value
        )
        for key, each in value.items():
            inner_schema = schema.get("properties", {}).get(
                key, schema.get("additionalProperties", {})
            )
            if inner_schema is False and key not in schema["properties"]:
                yield f"{path}.{key} is not known"
            else:
                yield from find_errors(each, inner_schema, f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from find_errors(each, schema.get("items", {}), f"{path}[{index}]")


def make_excerpt(schema: Schema, values: list[Any], known: Schema) -> Schema | bool:
    """Return the excerpt of `schema` for `values`; `known` are the schemas to which a $ref may
    refer."""
    schema = _resolve_reference(schema, known)
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}

    kept_fields = {key: schema[key] for key in ("type", *LIMITS) if key in schema}
    if schema.get(ANY):
        return kept_fields

    if "properties" in schema:
        if not values:
            return False

        kept_fields["additionalProperties"] = False
        kept_fields["properties"] = {
            key: make_excerpt(inner_schema, [value[key] for value in values if key in value], known)
            for key, inner_schema in schema["properties"].items()
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [each for value in values for each in value.values()]
        kept_fields["additionalProperties"] = make_excerpt(
            schema["additionalProperties"], inner, known
        )
    elif "items" in schema:
        kept_fields["items"] = make_excerpt(
            schema["items"], [each for value in values for each in value], known
        )

    return kept_fields


def _resolve_reference(schema: Schema, known: Schema) -> Schema:
    references = [schema, *schema.get("allOf", [])]
    (name,) = [each["$ref"] for each in references if "$ref" in each] or [""]
    if name:
        return known[name.rpartition("/")[2]]
    return schema


def _parse_object(schema: Schema | bool) -> Schema:
    assert isinstance(schema, dict), "an object sets at least its kind"
    return schema


def read_schemas(files: Iterable[str]) -> tuple[dict[tuple[str, str], Schema], Schema]:
    """Return {(apiVersion, kind): schema} of the files, and the definitions of Kubernetes."""
    schemas = dict[tuple[str, str], Schema]()
    known = Schema()

    for file in map(Path, files):
        if file.suffix == ".json":
            known = json.loads(file.read_text())["definitions"]
            for schema in known.values():
                for each in schema.get("x-kubernetes-group-version-kind", []):
                    schemas[
                        "/".join(filter(None, (each["group"], each["version"]))), each["kind"]
                    ] = schema
        else:
            spec = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                # the API server knows this field, although the schema does not contain it
                schema["properties"]["metadata"] = {"$ref": METADATA}
                schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema

    return schemas, known


def main(files: list[str]) -> None:
    from tests.rendered import list_rendered

    schemas, known = read_schemas(files)
    objects = dict[tuple[str, str], list[Any]]()
    for manifest in list_rendered():
        objects.setdefault((manifest["apiVersion"], manifest["kind"]), []).append(manifest)
    for (api, kind), values in objects.items():
        schema = {
            "$schema": DRAFT_URL,
            **_parse_object(make_excerpt(schemas[api, kind], values, known)),
        }
        text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
        (SCHEMAS / file_name(api, kind)).write_text(
            re.sub(r"(?<=,|\{)(?=\"properties\")", "\n", text) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
