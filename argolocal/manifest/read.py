"""Read a Workflow, WorkflowTemplate or CronWorkflow and build the Workflow that runs."""

import copy
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argolocal.common.checked_names import show
from argolocal.errors import ConfigError, did_you_mean
from argolocal.language.gofmt import timestamp
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
from argolocal.manifest.schema import TABLES, walk
from argolocal.manifest.shape import shape_errors, without_nulls

# the random suffix that the API server appends to `generateName`
SUFFIX_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
SUFFIX_LENGTH = 5
# recognizes a text that is meant to be an Argo manifest, even if it is invalid YAML
WORKFLOW_TEXT = re.compile(r"""^["' {]*apiVersion["']?\s*:\s*["']?argoproj\.io/""", re.MULTILINE)
# matches actions of a Go template, such as in a Helm chart, but not the tags of Argo
GO_TEMPLATE = re.compile(
    r"\{\{-|\{\{\s*(\.|\$|(include|template|toYaml|if|range|with|end|define|quote|tpl)\b)"
)


@dataclass(frozen=True)
class Identity:
    """The name, uid and other values that the API server sets in a new object."""

    created: float = 0.0  # seconds since the epoch
    uid: str = "00000000-0000-0000-0000-000000000000"
    suffix: str = "00000"  # random characters that the API server appends to generateName

    def name(self, prefix: str) -> str:
        """Return the name that the API server generates for the generateName `prefix`."""
        return prefix[:58] + self.suffix


def generate_suffix() -> str:
    """Return a random suffix for `generateName`, as the API server generates it."""
    return "".join(random.SystemRandom().choices(SUFFIX_CHARACTERS, k=SUFFIX_LENGTH))


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML or JSON text, including the items of each List. Raises
    ConfigError."""
    objects = [item for document in parse(text) if document for item in _items(document)]
    if not all(isinstance(document, dict) for document in objects):
        raise ConfigError(
            "the manifest contains something that is not an object: each document must be a"
            " mapping."
        )
    return objects


def _items(document: object) -> list[Any]:
    """Return the items of a List, as kubectl does. Return [document] for any other document."""
    if isinstance(document, dict) and str(document.get("kind")).endswith("List"):
        items = document.get("items")
        if isinstance(items, list):
            return items
    return [document]


def split(objects: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object to run, and the other objects. Raises ConfigError."""
    for kinds in (("Workflow", "CronWorkflow"), ("WorkflowTemplate",)):
        main_objects = [item for item in objects if item.get("kind") in kinds]
        if len(main_objects) == 1 or len(objects) == 1:
            main_objects = main_objects or objects
            return main_objects[0], [item for item in objects if item is not main_objects[0]]

        if main_objects:
            break

    pairs = [(item.get("kind"), item.get("metadata")) for item in objects]
    titles = [
        f"{kind} {meta.get('name', '') if isinstance(meta, dict) else ''}".strip()
        for kind, meta in pairs
    ]
    raise ConfigError(
        f"{len(objects)} objects ({', '.join(titles)}) are given: exactly one must be a Workflow to"
        " run."
    )


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
        objects = documents(read_text(file))
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
class Documents:
    """The objects that files and folders contain.

    `objects`: pairs of a file and an object in it. `other_files`: files in folders that contain no
    objects. `broken_files`: maps files in folders whose manifest cannot be parsed to the error.
    """

    objects: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    other_files: list[str] = field(default_factory=list)
    broken_files: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path) -> None:
        """Add a file, or the manifests in a folder. Raises ConfigError for an invalid file and for
        a folder without manifests."""
        if not path.is_dir():
            self.objects += [(str(path), item) for item in read_objects(path)]
            return
        count = len(self.objects) + len(self.broken_files)
        for file in list_manifest_files(path):
            self._add_file_of_folder(file)
        if len(self.objects) + len(self.broken_files) == count:
            raise ConfigError(f"{path} does not contain a manifest: give a folder of manifests.")

    def _add_file_of_folder(self, file: Path) -> None:
        text = ""
        try:
            # reading a file that is not regular, such as a pipe, could wait forever
            text = read_text(file) if file.is_file() else ""
            parsed = [item for document in parse(text) if document for item in _items(document)]
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if WORKFLOW_TEXT.search(text) and not GO_TEMPLATE.search(text):
                self.broken_files[str(file)] = str(error)
            else:
                self.other_files.append(str(file))

            return

        manifests = [(str(file), item) for item in parsed if _is_manifest(item)]
        self.objects += manifests
        if not manifests:
            self.other_files.append(str(file))


def _is_manifest(document: object) -> bool:
    """Return True if a document is a Kubernetes object, and not Helm values, a kustomization or
    settings of another program."""
    if not isinstance(document, dict):
        return False
    version = str(document.get("apiVersion") or "")
    if version.startswith(("argoproj.io/", "kustomize.config.k8s.io/")):
        return version.startswith("argoproj.io/")
    kind = document.get("kind")
    return bool(kind) and (bool(version) or kind in (*WORKFLOW_KINDS, "ClusterWorkflowTemplate"))


def read_files(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object to run and the other objects in a file or folder. Raises ConfigError."""
    objects = [manifest for file in list_manifest_files(path) for manifest in read_objects(file)]
    try:
        return split(objects)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def workflow(
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str] | None = None,
    find: Find = lambda kind, name: None,
    for_this_machine: bool = True,
    identity: Identity = Identity(),
) -> dict[str, Any]:
    """Build the Workflow that a manifest describes, with a name, a uid, and the values of
    `parameters`.

    Raises ConfigError. With `for_this_machine`, fields that only a cluster supports are errors,
    too."""
    kind = _checked_kind(manifest, for_this_machine)
    created = timestamp(identity.created)
    reference = None
    spec = copy.deepcopy(without_nulls(manifest.get("spec") or {}))
    metadata = copy.deepcopy(manifest.get("metadata") or {})

    if kind == "CronWorkflow":
        name = metadata.get("name") or "cron"
        workflow_metadata = spec.get("workflowMetadata") or {}
        metadata["name"] = f"{name}-{int(identity.created)}"
        metadata["labels"] = {
            object_labels.CRON_WORKFLOW: name,
            **(workflow_metadata.get("labels") or {}),
        }
        metadata["annotations"] = {
            object_labels.SCHEDULED_TIME: created,
            **(workflow_metadata.get("annotations") or {}),
        }
        spec = spec.get("workflowSpec") or {}
    elif kind == "WorkflowTemplate":
        reference = {"name": metadata.get("name") or "workflow"}
        metadata["name"] = identity.name(f"{reference['name']}-")
        metadata["labels"] = {}
        metadata["annotations"] = {}
        check_exit_handler(spec, parameters or {})
    elif not metadata.get("name"):
        metadata["name"] = identity.name(metadata.get("generateName") or "workflow-")

    reference = reference or spec.get("workflowTemplateRef")
    spec = merge_template_ref(spec, find, parameters or {})
    if reference:
        if reference.get("clusterScope"):
            label = object_labels.CLUSTER_WORKFLOW_TEMPLATE
        else:
            label = object_labels.WORKFLOW_TEMPLATE

        metadata["labels"] = {**(metadata.get("labels") or {}), label: reference["name"]}

    for key in ("labels", "annotations"):
        metadata[key] = {
            **(metadata.get(key) or {}),
            **((spec.get("workflowMetadata") or {}).get(key) or {}),
        }

    metadata["uid"] = identity.uid
    metadata["creationTimestamp"] = created
    metadata.setdefault("namespace", "default")
    stringify_parameters(spec)
    _set_parameters(spec, parameters or {})
    fill_from_config_maps(spec, find)
    _check_choices(spec)

    return {"apiVersion": API_VERSION, "kind": "Workflow", "metadata": metadata, "spec": spec}


def _checked_kind(manifest: Mapping[str, Any], for_this_machine: bool) -> str:
    """Return the kind of an object. Raises ConfigError if the object cannot be run as a
    workflow."""
    problem = next(shape_errors(manifest), "")
    if problem:
        raise ConfigError(f"{problem}.")

    kind = manifest.get("kind")
    if kind not in WORKFLOW_KINDS:
        hint = did_you_mean(str(kind), set(WORKFLOW_KINDS))
        raise ConfigError(f"kind is {kind!r}: it must be one of {', '.join(WORKFLOW_KINDS)}.{hint}")

    version = manifest.get("apiVersion", API_VERSION)
    if version != API_VERSION:
        raise ConfigError(
            f"apiVersion is {show(version)}: of a {kind} of Argo, it must be {API_VERSION}."
        )

    if for_this_machine:
        list(walk(manifest, kind, ""))

    for where, value, table in (
        ("", manifest, kind),
        ("metadata.", manifest.get("metadata") or {}, "ObjectMeta"),
    ):
        for key in value:
            if key not in TABLES[table]:
                hint = did_you_mean(str(key), set(TABLES[table]))
                raise ConfigError(f'"{where}{key}" is not a field of a {kind}.{hint} Remove it.')

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
    declared_parameters = (spec.get("arguments") or {}).get("parameters") or []
    for name, value in parameters.items():
        for parameter in declared_parameters:
            if parameter.get("name") == name:
                parameter.pop("valueFrom", None)
                parameter["value"] = value
                break
        else:
            hint = did_you_mean(
                name, {parameter.get("name", "") for parameter in declared_parameters}
            )
            raise ConfigError(
                f'the workflow does not have a parameter "{name}": declare it in'
                f" spec.arguments.parameters.{hint}"
            )
