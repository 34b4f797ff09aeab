"""Run resource templates: perform an action of kubectl on the local controllers, then wait for the
template's conditions.

The node fails ("main: ... exit code 64") if the failureCondition is true, the object is deleted, or
kubectl reports an error.

Source: Argo's executor/resource.go and cmd/argoexec/commands/resource.go.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.files import write_atomically
from argolocal.common.json_text import to_json
from argolocal.engine.nodes import PodEnded, PodStarted, Start
from argolocal.errors import ArgolocalError, ConfigError, describe
from argolocal.interfaces import Cluster
from argolocal.language import kubectl_path
from argolocal.language.selector import SelectorError, evaluate_conditions, selects
from argolocal.language.yaml_text import parse_one
from argolocal.manifest.patch import PATCHES, PatchError
from argolocal.manifest.read import Identity, generate_suffix
from argolocal.manifest.types import Object
from argolocal.state.stored_objects import VERSIONED_KINDS

# flags that take a value and have no effect here
FLAGS_WITH_VALUE = ("-n", "--namespace", "--field-manager", "--grace-period", "--timeout")
IGNORED_FLAGS = (
    "--validate",
    "--cascade",
    "--wait",
    "--force",
    "--now",
    "--ignore-not-found",
    "--overwrite",
    "--server-side",
)
ALREADY_EXISTS = 'Error from server (AlreadyExists): error when creating "/tmp/manifest.yaml":'
CORE_KINDS = (
    "ConfigMap",
    "Secret",
    "HorizontalPodAutoscaler",
    "PodDisruptionBudget",
    "Deployment",
    "Service",
)
# kinds whose objects have no processes, so they need no clean-up after a crash of the runner
PASSIVE_KINDS = (
    "HTTPRoute",
    "Ingress",
    "PersistentVolumeClaim",
    *VERSIONED_KINDS,
)
# (type, status) of the status conditions that report the failure of an object
FAILURE_CONDITIONS = (("Failed", "True"), ("Progressing", "False"))
ACTIONS = ("get", "create", "apply", "patch", "delete", "replace")


class KubectlError(Exception):
    """An action has failed; the text is the message that kubectl would print."""


@dataclass(frozen=True)
class WaitingNode:
    """A node that waits until its object meets a condition."""

    action: Start
    kind: str
    name: str


class Resources:
    """The resource templates of one run. Controllers are created on first use."""

    def __init__(self, cluster: Cluster, workflow: dict[str, Any], run: Path) -> None:
        self.cluster = cluster
        self.workflow = workflow
        self.run = run
        self.controllers: dict[str, Any] = {}
        self.waiting: dict[str, WaitingNode] = {}

    @property
    def busy(self) -> bool:
        """True if controllers are in use, so that `poll` must be called every 0.1 s."""
        return bool(self.controllers)

    def start(self, action: Start) -> list[PodStarted | PodEnded]:
        """Perform the action of a node's resource template. If the object does not meet its
        conditions yet, a later call of `poll` completes the node."""
        resource = action.template["resource"]

        conditions = resource.get("successCondition") or resource.get("failureCondition")
        if resource["action"] == "delete" and (
            conditions or (action.template.get("outputs") or {}).get("parameters")
        ):
            message = (
                "successCondition, failureCondition and outputs are not supported for delete action"
            )
            return [PodStarted(action.id), _failure(action.id, message)]

        try:
            kind, name = self._perform(resource, self.run / "creates" / action.id)
        except (KubectlError, ArgolocalError) as error:
            return [PodStarted(action.id), _failure(action.id, f"no more retries {error}")]

        if not conditions:
            return [
                PodStarted(action.id),
                self._make_success_event(WaitingNode(action, kind, name)),
            ]

        self.waiting[action.id] = WaitingNode(action, kind, name)
        return [PodStarted(action.id), *self._check_conditions(self.waiting[action.id])]

    def poll(self) -> list[PodStarted | PodEnded]:
        """Poll the controllers, then check the conditions of the waiting nodes."""
        events: list[PodStarted | PodEnded] = []
        for controller in set(self.controllers.values()):
            try:
                controller.poll()
            except Exception as error:
                events += self._fail_nodes_of(controller, error)

        for waiting in list(self.waiting.values()):
            try:
                events += self._check_conditions(waiting)
            except Exception as error:
                self.forget(waiting.action.id)
                events.append(PodEnded(waiting.action.id, "Error", describe(error)))

        return events

    def _fail_nodes_of(self, controller: Any, error: Exception) -> list[PodStarted | PodEnded]:
        """Return an Error event for each node that waits for an object of `controller`, whose
        `poll` has failed."""
        ids = [
            id
            for id, waiting in self.waiting.items()
            if self.controllers.get(waiting.kind) is controller
        ]
        for id in ids:
            self.forget(id)
        return [PodEnded(id, "Error", f"{controller.kind}: {describe(error)}") for id in ids]

    def overdue_nodes(self, now: float) -> list[str]:
        return [
            id
            for id, waiting in self.waiting.items()
            if waiting.action.deadline and now >= waiting.action.deadline
        ]

    def forget(self, id: str) -> None:
        """Stop watching the object of a node, without deleting the object."""
        self.waiting.pop(id, None)

    def clean_up(self) -> None:
        """Remove files that completed jobs left because their runner died."""
        # the files of StoredObjects begin with a dot
        kinds = {folder.name for folder in (self.cluster.home / "objects").glob("[!.]*")}
        # import only the controllers of kinds whose objects have processes, because an import takes
        # time
        for kind in kinds - {*CORE_KINDS, *PASSIVE_KINDS}:
            self._controller(kind).clean_up()

    def stop(self, grace: float) -> None:
        """Stop waiting for conditions, and stop the processes of jobs."""
        self.waiting.clear()
        for controller in set(self.controllers.values()):
            controller.stop(grace)

    def _controller(self, kind: str) -> Any:
        self.controllers = self.controllers or self.cluster.kinds.controllers(
            self.cluster, self.run
        )
        controller = self.controllers.get(kind)
        if controller is None:
            raise KubectlError(
                f'no matches for kind "{kind}": only {", ".join(sorted(self.controllers))} are'
                " supported here"
            )
        return controller

    def _perform(self, resource: dict[str, Any], record: Path) -> tuple[str, str]:
        """Perform the action of a resource template. Return kind and name of the object.

        The file `record` stores the name of the created object or the patched object, so that a
        restarted runner does not repeat the action. Raises KubectlError, ConfigError.
        """
        action = resource["action"]
        flags = resource.get("flags") or []

        if action == "patch":
            strategy = resource.get("mergeStrategy") or "strategic"
        else:
            strategy = ""

        obj = self._parse_manifest(resource) if resource.get("manifest") else {}
        words, selector = parse_flags(flags)
        if action == "delete" and selector and not obj and len(words) == 1:
            return self._delete_selected(words[0], selector)
        if action == "delete" and not obj and len(words) == 2:
            return self._delete_named(words[0].split(","), words[1])
        if strategy != "json" and not isinstance(obj, dict):
            raise KubectlError("the manifest does not contain an object")

        if isinstance(obj, dict) and not _has_kind_and_metadata(obj):
            raise KubectlError(
                "error validating data: kind must be text, and metadata must be a mapping"
            )

        if not obj or (strategy and flags and (strategy == "json" or not obj.get("kind"))):
            if len(words) != 2:
                raise KubectlError(f"flags {flags} must name a kind and an object")

            kind = self._resolve_kind(words[0])
            name = words[1]
        else:
            meta = obj.get("metadata") or {}
            if action == "create" and not meta.get("name") and meta.get("generateName"):
                generated = Identity(suffix=generate_suffix()).name(str(meta["generateName"]))
                name = record.read_text() if record.exists() else generated
                obj["metadata"] = {**meta, "name": name}

            kind = obj.get("kind", "")
            name = (obj.get("metadata") or {}).get("name", "")

        if not kind or not name:
            raise KubectlError(
                "Kind and name are both required but at least one of them is missing from the"
                " manifest"
            )

        controller = self._controller(kind)
        existing = controller.get(name)
        not_found = f'Error from server (NotFound): {kind.lower()}s "{name}" not found'

        if action == "delete":
            if existing is not None:
                controller.delete(name)
        elif action == "create" and existing is not None and not record.exists():
            raise KubectlError(f'{ALREADY_EXISTS} {kind.lower()}s "{name}" already exists')
        elif (
            action == "get" and existing is None and "--ignore-not-found" in " ".join(flags).split()
        ):
            return kind, ""
        elif action in ("get", "patch", "replace") and existing is None:
            raise KubectlError(not_found)
        elif action == "patch":
            self._patch(controller, name, obj, strategy, record)
        elif action != "get":
            if action == "create":
                record.parent.mkdir(exist_ok=True)
                write_atomically(record, name)

            controller.apply(obj)

        return kind, name

    def _patch(self, controller: Any, name: str, patch: Any, strategy: str, record: Path) -> None:
        """Patch an object exactly once, even if the runner dies and restarts. A second patch could
        fail or have another result."""

        def update(current_object: Object) -> Object:
            # Kubernetes does not support strategic merge patches of custom resources
            if strategy == "strategic" and current_object["kind"] not in CORE_KINDS:
                raise KubectlError(
                    "error from server (UnsupportedMediaType): the body of the request was in an"
                    " unknown format - accepted media types include: application/json-patch+json,"
                    " application/merge-patch+json"
                )

            if record.exists() and _patchable_fields(current_object) == json.loads(
                record.read_text()
            ):
                return current_object

            try:
                new_object = apply_patch(current_object, patch, strategy)
            except PatchError as error:
                raise KubectlError(
                    f"The request is invalid: the server rejected our request: {error}"
                ) from None

            record.parent.mkdir(exist_ok=True)
            write_atomically(record, to_json(_patchable_fields(new_object)))
            return new_object

        controller.patch(name, update)

    def _parse_manifest(self, resource: dict[str, Any]) -> Any:
        text = resource["manifest"]
        try:
            if resource["action"] == "patch" and text.lstrip()[:1] == "{":
                json.loads(text)  # a patch that starts with { is parsed as JSON, as in kubectl
        except json.JSONDecodeError as error:
            raise KubectlError(
                f"Error from server (BadRequest): error decoding patch: {error}"
            ) from None
        except (ValueError, RecursionError):
            pass  # parse_one, called below, reports the limit that the text exceeds

        try:
            obj = parse_one(text, "the manifest")
        except ConfigError as error:
            raise KubectlError(str(error)) from None

        if (
            isinstance(obj, dict)
            and _has_kind_and_metadata(obj)
            and resource.get("setOwnerReference")
        ):
            meta = self.workflow["metadata"]
            owner = {
                "apiVersion": self.workflow["apiVersion"],
                "kind": "Workflow",
                "controller": True,
                "name": meta["name"],
                "uid": meta["uid"],
                "blockOwnerDeletion": True,
            }

            references = obj.setdefault("metadata", {}).setdefault("ownerReferences", [])
            references.append(owner)

        return obj

    def _resolve_kind(self, resource_type: str) -> str:
        """Return the kind of a resource type of kubectl, such as `pod`, `pods` or
        `deployments.apps`."""
        self._controller("ConfigMap")
        kind_of_type = {
            word: kind for kind in self.controllers for word in (kind.lower(), kind.lower() + "s")
        }
        return kind_of_type.get(resource_type.lower().split(".")[0], resource_type)

    def _delete_named(self, kinds: list[str], name: str) -> tuple[str, str]:
        """For each of the kinds, delete the object called `name` if it exists."""
        for kind in map(self._resolve_kind, kinds):
            controller = self._controller(kind)
            if controller.get(name) is not None:
                controller.delete(name)
        return self._resolve_kind(kinds[0]), name

    def _delete_selected(self, resource_type: str, selector: str) -> tuple[str, str]:
        kind = self._resolve_kind(resource_type)
        controller = self._controller(kind)
        try:
            for name in controller.names():
                if selects(
                    selector,
                    ((controller.read(name) or {}).get("metadata") or {}).get("labels") or {},
                ):
                    controller.delete(name)
        except SelectorError as error:
            raise KubectlError(f"error: unable to parse requirement: {error}") from None
        return kind, ""

    def _check_conditions(self, waiting: WaitingNode) -> list[PodStarted | PodEnded]:
        resource = waiting.action.template["resource"]
        id = waiting.action.id

        obj = self._controller(waiting.kind).get(waiting.name)
        if obj is None:
            self.forget(id)
            message = (
                "The resource has been deleted while its status was still being checked. Will not"
                " be retried"
            )
            return [_failure(id, message)]

        try:
            succeeded, reason = evaluate_conditions(
                obj, resource.get("successCondition") or "", resource.get("failureCondition") or ""
            )
        except SelectorError as error:
            succeeded = False
            reason = f"condition failed to parse: {error}"

        if succeeded is None:
            return []

        self.forget(id)
        if succeeded:
            return [self._make_success_event(waiting)]

        cause = _reported_cause(obj)
        return [_failure(id, f"{reason}: {cause}" if cause else reason)]

    def _make_success_event(self, waiting: WaitingNode) -> PodEnded:
        outputs: dict[str, Any] = {"exitCode": "0"}
        obj = (self._controller(waiting.kind).get(waiting.name) if waiting.name else None) or {}

        for parameter in (waiting.action.template.get("outputs") or {}).get("parameters") or []:
            value = parameter.get("value")
            path = (parameter.get("valueFrom") or {}).get("jsonPath")

            if not waiting.name:  # the flag --ignore-not-found allows the object to be missing
                value = parameter["valueFrom"].get("default", "")
            elif path:
                try:
                    value = kubectl_path.render(obj, path)
                except kubectl_path.KubectlPathError as error:
                    return _failure(
                        waiting.action.id,
                        f'error executing jsonpath "{path}": Error executing template: {error}',
                    )

            outputs.setdefault("parameters", []).append({**parameter, "value": value})

        return PodEnded(waiting.action.id, "Succeeded", "", outputs)


def _reported_cause(obj: Object) -> str:
    """Return the message of the status condition that reports the failure of an object, or ""."""
    status = obj.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    failures = [
        condition
        for condition in conditions or []
        if (condition.get("type"), condition.get("status")) in FAILURE_CONDITIONS
        and condition.get("message")
    ]
    if failures:
        return str(failures[-1]["message"])
    return ""


def _has_kind_and_metadata(obj: Object) -> bool:
    """Return True if an object's kind and metadata have the right types or are missing."""
    return isinstance(obj.get("kind") or "", str) and isinstance(obj.get("metadata") or {}, dict)


def parse_flags(flags: list[str]) -> tuple[list[str], str]:
    """Return the positional arguments and the label selector of `flags`. Raises KubectlError for a
    flag that is not supported here."""
    words = []
    selector = ""

    remaining = iter([word for flag in flags for word in flag.split()])
    for word in remaining:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            words += [name for name in word.split("/") if name]
        elif flag in ("-l", "--selector"):
            selector = value if equals else next(remaining, "")
        elif flag in FLAGS_WITH_VALUE:
            value = value if equals else next(remaining, "")
        elif flag not in IGNORED_FLAGS:
            supported = ", ".join(("--selector", *FLAGS_WITH_VALUE, *IGNORED_FLAGS))
            raise KubectlError(
                f"the flag {flag} is not supported here: the supported flags are {supported}"
            )

    return words, selector


def apply_patch(obj: Object, patch: object, strategy: str) -> Object:
    """Return the object with the patch applied; its status is not changed. Raises PatchError."""
    status = {"status": obj["status"]} if "status" in obj else {}
    return (
        PATCHES[strategy]({key: value for key, value in obj.items() if key != "status"}, patch)
        | status
    )


def _patchable_fields(obj: Object) -> Object:
    """Return the object without its status, resourceVersion and generation, which a patch does not
    set."""
    counters = ("resourceVersion", "generation")
    meta = {key: value for key, value in obj["metadata"].items() if key not in counters}
    return {key: value for key, value in obj.items() if key != "status"} | {"metadata": meta}


def _failure(id: str, reason: str) -> PodEnded:
    code = exit_codes.EXECUTOR_ERROR
    message = f"main: Error (exit code {code}): {reason}"
    return PodEnded(id, "Failed", message, {"exitCode": str(code)})
