"""Run and lint workflows from Python, for example in tests of your pipelines. A workflow is a Hera
workflow, a dict or a YAML file."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from argolocal.common.checked_names import format_untrusted
from argolocal.controllers.controller_kinds import Kinds
from argolocal.errors import ConfigError
from argolocal.manifest.read import read_objects, split_main_object
from argolocal.manifest.types import Manifest
from argolocal.pods.artifacts import load
from argolocal.pods.container_images import Image
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.store import ObjectStore
from argolocal.validate import Finding, lint_all
from argolocal.view import summary


@runtime_checkable
class HeraWorkflow(Protocol):
    """A workflow of Hera, the Python library for Argo Workflows."""

    def to_dict(self) -> object: ...


Workflow = HeraWorkflow | Manifest | str | Path


@dataclass(frozen=True)
class Node:
    """A step of a run.

    `outputs` maps names to output parameters, including `result`; `artifacts` maps names to Argo's
    artifact objects.
    """

    name: str
    phase: str
    message: str
    outputs: Mapping[str, str]
    artifacts: Mapping[str, Mapping[str, Any]]
    exit_code: int | None
    _log_file: Path = field(repr=False)

    @property
    def log(self) -> str:
        """Text that the step's main container has printed."""
        if self._log_file.exists():
            return self._log_file.read_text(errors="replace")
        return ""


@dataclass(frozen=True)
class Outcome:
    """The result of a run. A temporary home (a folder with the data of the run) is deleted when the
    Outcome is garbage-collected."""

    name: str
    status: Mapping[str, Any]  # Argo's WorkflowStatus
    home: Path
    store: ObjectStore = field(repr=False)
    _folder: "TemporaryDirectory[str] | None" = field(default=None, repr=False)

    @property
    def phase(self) -> str:
        """Phase of the run, which is Succeeded, Failed or Error."""
        return self.status["phase"]

    @property
    def message(self) -> str:
        """Reason why the run did not succeed; "" if it succeeded."""
        return self.status.get("message") or ""

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """Maps the name of each step to its Node; the name `ship.release` means the step `release`
        of the template that the task `ship` calls."""
        return {
            step.name: self._make_node(step, step.node)
            for step in summary.list_steps(self.name, self.status)
            if step.node
        }

    @cached_property
    def outputs(self) -> dict[str, str]:
        """Output parameters of the entrypoint template, and all output parameters with a
        `globalName`."""
        entry_node = next(
            (node for node in self.status["nodes"].values() if node["name"] == self.name), {}
        )
        return summary.list_outputs(entry_node) | summary.list_outputs(self.status)

    def artifact(self, node: str, name: str, to: Path) -> Path:
        """Copy an artifact of a node to the path `to`, and unpack it as if it were an input of
        another step. Raises KeyError for an unknown node or artifact, and StorageError."""
        load(dict(self.nodes[node].artifacts[name]), to, lambda s3_location: self.store)
        return to

    def _make_node(self, step: summary.Step, node: Mapping[str, Any]) -> Node:
        node_outputs = node.get("outputs") or {}
        result_output = {"result": node_outputs["result"]} if "result" in node_outputs else {}
        exit_code = node_outputs.get("exitCode")

        # Look for the last attempt of retried steps only: the search visits all nodes of the run.
        if step.kind == "Retry":
            attempt = summary.find_last_attempt(self.status, step)
        else:
            attempt = node

        pod_name = summary.make_pod_name(self.name, attempt)

        return Node(
            name=step.name,
            phase=node["phase"],
            message=node.get("message") or "",
            outputs=summary.list_outputs(node) | result_output,
            artifacts={
                artifact["name"]: artifact for artifact in node_outputs.get("artifacts") or []
            },
            exit_code=None if exit_code is None else int(exit_code),
            _log_file=self.home / "runs" / self.name / "logs" / f"{pod_name}.log",
        )

    def __str__(self) -> str:
        """Return a few lines that name the failed step and the reason."""
        step = summary.find_failed_step(summary.list_steps(self.name, self.status))
        log_text = self.nodes[step.name].log if step else ""
        return summary.failure(self.name, self.status, log_text, None, "")


def run(
    workflow: Workflow,
    parameters: Mapping[str, str] | None = None,
    *,
    objects: Iterable[Manifest] = (),
    images: Mapping[str, Image | Mapping[str, Any]] | None = None,
    kinds: Kinds | None = None,
    store: Callable[[Manifest], ObjectStore] | None = None,
    home: Path | None = None,
) -> Outcome:
    """Run a workflow on this machine to its end. Raises ConfigError before any step starts if the
    workflow cannot run.

    `objects` are WorkflowTemplates, ConfigMaps and Secrets that the workflow refers to and that are
    not in its file. `images`, `kinds` and `store` are passed to LocalCluster. `home` is the folder
    for the data of runs; the default is a temporary folder, which is deleted when the outcome is
    garbage-collected.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ConfigError(
            f"parameters is {format_untrusted(parameters)}: it must be a dict from names to"
            " values. Correct the argument."
        )

    temporary_home = None
    if home is None:
        temporary_home = TemporaryDirectory(prefix="argolocal-")
        home = Path(temporary_home.name) / "home"

    cluster = LocalCluster(home, None if images is None else _convert_images(images), kinds, store)
    manifest, other_objects = split_main_object(_read_objects(workflow))
    cluster.store_objects([*_check_manifests(objects), *other_objects])
    local_run = LocalRun.create(manifest, parameters, cluster)
    status = local_run.run()

    return Outcome(local_run.name, status, cluster.home, cluster.store(), temporary_home)


def _convert_images(images: Mapping[str, Image | Mapping[str, Any]]) -> dict[str, Image]:
    """Return `images` with each dict of fields, as in images.yaml, converted to an Image. Raises
    ConfigError."""
    try:
        return {
            name: image if isinstance(image, Image) else Image(**image)
            for name, image in images.items()
        }
    except (AttributeError, TypeError) as error:
        fields = ", ".join(Image.__dataclass_fields__)
        raise ConfigError(
            f"images: {error}. An image is an Image, or a dict of its fields {fields}."
        ) from None


def lint(workflow: Workflow, objects: Iterable[Manifest] = ()) -> list[Finding]:
    """Return the mistakes in a workflow and in the `objects` that the workflow refers to; Argo
    rejects only the `fatal` mistakes."""
    return lint_all(
        [("", manifest) for manifest in (*_read_objects(workflow), *_check_manifests(objects))]
    )


def _read_objects(workflow: Workflow) -> list[dict[str, Any]]:
    if isinstance(workflow, str | Path):
        return read_objects(Path(workflow))

    if isinstance(workflow, HeraWorkflow) and not isinstance(workflow, type):
        manifest = workflow.to_dict()
    else:
        manifest = workflow

    return [
        _check_manifest("workflow", manifest, "the path of a file, a workflow of Hera or a dict")
    ]


def _check_manifests(objects: Iterable[Manifest]) -> list[dict[str, Any]]:
    """Return the manifests in the argument `objects` as a list. Raises ConfigError."""
    if isinstance(objects, Mapping | str) or not isinstance(objects, Iterable):
        raise ConfigError(
            f"objects is {format_untrusted(objects)}: it must be a list of dicts. Pass [OBJECT]."
        )
    return [
        _check_manifest("objects", object_manifest, "a list of dicts")
        for object_manifest in objects
    ]


def _check_manifest(argument_name: str, value: object, type_requirement: str) -> dict[str, Any]:
    """Return a manifest argument as a dict. Raises ConfigError if the manifest is not a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{argument_name} is {format_untrusted(value)}: it must be {type_requirement}. Correct"
            " the argument."
        )
    return dict(value)
