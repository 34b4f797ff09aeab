"""Read a Workflow, WorkflowTemplate or CronWorkflow, and build the Workflow that is run."""

import copy
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import format_untrusted
from argolocal.errors import ConfigError, suggest_similar
from argolocal.language.gofmt import format_timestamp
from argolocal.language.yaml_text import parse, read_text
from argolocal.manifest import object_labels
from argolocal.manifest.allowed_values import API_VERSION, WORKFLOW_KINDS
from argolocal.manifest.resolve import (
    Find,
    check_exit_handler,
    fill_from_config_maps,
    merge_template_ref,
    stringify_parameters,
)
from argolocal.manifest.schema import TABLES, find_ignored_fields
from argolocal.manifest.shape import find_shape_errors, remove_nulls

# the random suffix that the API server appends to `generateName`
SUFFIX_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
SUFFIX_LENGTH = 5
# recognizes a text that is meant to be an Argo manifest, even if it is invalid YAML
WORKFLOW_START = re.compile(r"""^["' {]*apiVersion["']?\s*:\s*["']?argoproj\.io/""", re.MULTILINE)
# matches actions of a Go template, such as a Helm chart, but not the tags of Argo
GO_TEMPLATE_START = re.compile(
    r"\{\{-|\{\{\s*(\.|\$|(include|template|toYaml|if|range|with|end|define|quote|tpl)\b)"
)


@dataclass(frozen=True)
class ObjectIdentity:
    """The name, uid and other values that the API server sets in a new object."""

    # seconds since the epoch
    created: float = 0.0
    uid: str = "00000000-0000-0000-0000-000000000000"
    # random characters that the API server appends to generateName
    suffix: str = "00000"

    def name(self, prefix: str) -> str:
        """Return the name that the API server generates for the generateName `prefix`."""
        return prefix[:58] + self.suffix


def generate_suffix() -> str:
    """Return a random suffix for `generateName`, as the API server generates it."""
    return "".join(random.SystemRandom().choices(SUFFIX_CHARACTERS, k=SUFFIX_LENGTH))


def parse_objects(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML or JSON text, including the items of each List. Raises
    ConfigError."""
    objects = [
        list_item for document in parse(text) if document for list_item in _list_items(document)
    ]
    if not all(isinstance(document, dict) for document in objects):
        raise ConfigError(
            "the manifest contains something that is not an object: each document must be a"
            " mapping."
        )
    return objects


def _list_items(document: object) -> list[Any]:
    """Return the items of a List, as kubectl does. If the document is not a List, return
    [document]."""
    if isinstance(document, dict) and str(document.get("kind")).endswith("List"):
        list_items = document.get("items")
        if isinstance(list_items, list):
            return list_items
    return [document]


def split_main_object(objects: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object to run, and the other objects. The object to run is the only Workflow or
    CronWorkflow, or else the only WorkflowTemplate, or else the only object. Raises ConfigError."""
    for kinds in (("Workflow", "CronWorkflow"), ("WorkflowTemplate",)):
        main_objects = [
            manifest_object for manifest_object in objects if manifest_object.get("kind") in kinds
        ]
        if len(main_objects) == 1 or len(objects) == 1:
            main_objects = main_objects or objects
            return main_objects[0], [
                manifest_object
                for manifest_object in objects
                if manifest_object is not main_objects[0]
            ]

        if main_objects:
            break

    object_titles = [_describe_object(manifest_object) for manifest_object in objects]
    raise ConfigError(
        f"{len(objects)} objects ({', '.join(object_titles)}) are given: exactly one must be a"
        " Workflow to run."
    )


def _describe_object(manifest_object: Mapping[str, Any]) -> str:
    """Return the kind and the name of an object that may be malformed."""
    metadata = manifest_object.get("metadata")
    name = metadata.get("name", "") if isinstance(metadata, dict) else ""
    return f"{manifest_object.get('kind')} {name}".strip()


def list_manifest_files(path: Path) -> list[Path]:
    """Return [path] for a file, or the manifest files in a folder. Raises ConfigError for a folder
    without manifest files."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml", ".json"))
    if files:
        return files
    raise ConfigError(
        f"{path} does not contain .yaml, .yml or .json files: give a folder of manifests."
    )


def read_objects(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a YAML or JSON file. Raises ConfigError for a file without objects."""
    try:
        objects = parse_objects(read_text(file))
        if objects:
            return objects
        raise ConfigError("the file does not contain an object: give a YAML or JSON manifest.")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): give a YAML or JSON manifest."
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


@dataclass
class ManifestDocuments:
    """The objects that files and folders contain.

    `objects`: pairs of a file's path and an object in the file. `other_files`: files in folders
    that do not contain manifests. `broken_files`: file in a folder whose manifest cannot be parsed
    → error message.
    """

    objects: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    other_files: list[str] = field(default_factory=list)
    broken_files: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path) -> None:
        """Read a file, or all manifests in a folder. Raises ConfigError for an invalid file, and
        for a folder without manifests."""
        if not path.is_dir():
            self.objects += [(str(path), manifest_object) for manifest_object in read_objects(path)]
            return
        previous_count = len(self.objects) + len(self.broken_files)
        for file in list_manifest_files(path):
            self._add_file_of_folder(file)
        if len(self.objects) + len(self.broken_files) == previous_count:
            raise ConfigError(f"{path} does not contain a manifest: give a folder of manifests.")

    def _add_file_of_folder(self, file: Path) -> None:
        """Read a file of a folder, which need not be a manifest."""
        text = ""
        try:
            # read only regular files: reading a pipe could wait forever
            text = read_text(file) if file.is_file() else ""
            parsed_objects = [
                list_item
                for document in parse(text)
                if document
                for list_item in _list_items(document)
            ]
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if WORKFLOW_START.search(text) and not GO_TEMPLATE_START.search(text):
                self.broken_files[str(file)] = str(error)
            else:
                self.other_files.append(str(file))

            return

        manifests = [
            (str(file), list_item) for list_item in parsed_objects if _is_manifest(list_item)
        ]
        self.objects += manifests
        if not manifests:
            self.other_files.append(str(file))


def _is_manifest(document: object) -> bool:
    """Return True if a document is a Kubernetes object. Values for Helm, kustomizations and
    settings of other programs are not Kubernetes objects."""
    if not isinstance(document, dict):
        return False
    api_version = str(document.get("apiVersion") or "")
    if api_version.startswith(("argoproj.io/", "kustomize.config.k8s.io/")):
        return api_version.startswith("argoproj.io/")
    kind = document.get("kind")
    return bool(kind) and (
        bool(api_version) or kind in (*WORKFLOW_KINDS, "ClusterWorkflowTemplate")
    )


def read_path(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object to run and the other objects in a file or folder. Raises ConfigError."""
    objects = [manifest for file in list_manifest_files(path) for manifest in read_objects(file)]
    try:
        return split_main_object(objects)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def build_workflow(
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str] | None = None,
    find_object: Find = lambda kind, name: None,
    is_for_this_machine: bool = True,
    identity: ObjectIdentity = ObjectIdentity(),
) -> dict[str, Any]:
    """Build the Workflow that a manifest describes, with a name, a uid, and the values of
    `parameters`. Raises ConfigError.

    `find_object`: function that returns an object to which the manifest refers.
    The value True of `is_for_this_machine` also rejects fields that only a cluster supports."""
    kind = _check_kind(manifest, is_for_this_machine)
    creation_time = format_timestamp(identity.created)
    template_reference = None
    spec = copy.deepcopy(remove_nulls(manifest.get("spec") or {}))
    metadata = copy.deepcopy(manifest.get("metadata") or {})

    if kind == "CronWorkflow":
        name = metadata.get("name") or "cron"
        workflow_metadata = spec.get("workflowMetadata") or {}
        metadata["name"] = f"{name}-{int(identity.created)}"
        metadata["labels"] = {
            object_labels.CRON_WORKFLOW_LABEL: name,
            **(workflow_metadata.get("labels") or {}),
        }
        metadata["annotations"] = {
            object_labels.SCHEDULED_TIME_ANNOTATION: creation_time,
            **(workflow_metadata.get("annotations") or {}),
        }
        spec = spec.get("workflowSpec") or {}
    elif kind == "WorkflowTemplate":
        template_reference = {"name": metadata.get("name") or "workflow"}
        metadata["name"] = identity.name(f"{template_reference['name']}-")
        metadata["labels"] = {}
        metadata["annotations"] = {}
        check_exit_handler(spec, parameters or {})
    elif not metadata.get("name"):
        metadata["name"] = identity.name(metadata.get("generateName") or "workflow-")

    template_reference = template_reference or spec.get("workflowTemplateRef")
    spec = merge_template_ref(spec, find_object, parameters or {})
    if template_reference:
        if template_reference.get("clusterScope"):
            template_label = object_labels.CLUSTER_WORKFLOW_TEMPLATE
        else:
            template_label = object_labels.WORKFLOW_TEMPLATE_LABEL

        metadata["labels"] = {
            **(metadata.get("labels") or {}),
            template_label: template_reference["name"],
        }

    for metadata_field in ("labels", "annotations"):
        metadata[metadata_field] = {
            **(metadata.get(metadata_field) or {}),
            **((spec.get("workflowMetadata") or {}).get(metadata_field) or {}),
        }

    metadata["uid"] = identity.uid
    metadata["creationTimestamp"] = creation_time
    metadata.setdefault("namespace", "default")
    stringify_parameters(spec)
    _set_parameters(spec, parameters or {})
    fill_from_config_maps(spec, find_object)
    _check_choices(spec)

    return {"apiVersion": API_VERSION, "kind": "Workflow", "metadata": metadata, "spec": spec}


def make_submitted_spec(
    manifest: Mapping[str, Any], parameters: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the spec of a workflow before its `workflowTemplateRef` is resolved, with the values
    of `parameters`. Return None for a workflow without a `workflowTemplateRef`."""
    spec = copy.deepcopy(remove_nulls(manifest.get("spec") or {}))
    if manifest.get("kind") == "CronWorkflow":
        spec = spec.get("workflowSpec") or {}
    if not spec.get("workflowTemplateRef"):
        return None

    stringify_parameters(spec)
    if parameters:
        arguments = spec["arguments"] = spec.get("arguments") or {}
        own_parameters = arguments.get("parameters") or []
        arguments["parameters"] = [
            *(parameter for parameter in own_parameters if parameter["name"] not in parameters),
            *({"name": name, "value": value} for name, value in parameters.items()),
        ]
    return spec


def _check_kind(manifest: Mapping[str, Any], is_for_this_machine: bool) -> str:
    """Return the kind of an object. Raises ConfigError if an object of this kind cannot be run as a
    workflow."""
    problem = next(find_shape_errors(manifest), "")
    if problem:
        raise ConfigError(f"{problem}.")

    kind = manifest.get("kind")
    if kind not in WORKFLOW_KINDS:
        hint = suggest_similar(str(kind), set(WORKFLOW_KINDS))
        raise ConfigError(f"kind is {kind!r}: it must be one of {', '.join(WORKFLOW_KINDS)}.{hint}")

    api_version = manifest.get("apiVersion", API_VERSION)
    if api_version != API_VERSION:
        raise ConfigError(
            f"apiVersion is {format_untrusted(api_version)}: of a {kind} of Argo, it must be"
            f" {API_VERSION}."
        )

    if is_for_this_machine:
        list(find_ignored_fields(manifest, kind, ""))

    for path_prefix, checked_object, type_name in (
        ("", manifest, kind),
        ("metadata.", manifest.get("metadata") or {}, "ObjectMeta"),
    ):
        for key in checked_object:
            if key not in TABLES[type_name]:
                hint = suggest_similar(str(key), set(TABLES[type_name]))
                raise ConfigError(
                    f'"{path_prefix}{key}" is not a field of a {kind}.{hint} Remove it.'
                )

    return kind


def _check_choices(spec: Mapping[str, Any]) -> None:
    """Raise ConfigError if the value of a parameter is not in the parameter's `enum`."""
    for parameter in (spec.get("arguments") or {}).get("parameters") or []:
        choices = parameter.get("enum")
        if isinstance(choices, list) and parameter.get("value") not in choices:
            name = parameter.get("name")
            value = parameter.get("value")
            raise ConfigError(
                f"the parameter {name} is {value!r}: it must be one of {', '.join(choices)}."
            )


def _set_parameters(spec: dict[str, Any], parameters: Mapping[str, str]) -> None:
    """Set the values of the workflow's parameters. Raises ConfigError for a parameter that the
    workflow does not have."""
    declared_parameters = (spec.get("arguments") or {}).get("parameters") or []
    for name, value in parameters.items():
        for parameter in declared_parameters:
            if parameter.get("name") == name:
                parameter.pop("valueFrom", None)
                parameter["value"] = value
                break
        else:
            hint = suggest_similar(
                name, {parameter.get("name", "") for parameter in declared_parameters}
            )
            raise ConfigError(
                f'the workflow does not have a parameter "{name}": declare it in'
                f" spec.arguments.parameters.{hint}"
            )
