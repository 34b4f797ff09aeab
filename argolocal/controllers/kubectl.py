"""Run resource templates: perform an action of kubectl on the local controllers, then wait for the
template's conditions.

The node fails ("main: ... exit code 64") if the failureCondition is true, the object is deleted, or
kubectl reports an error.

The behaviour follows Argo's executor/resource.go and cmd/argoexec/commands/resource.go.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.files import write_atomically
from argolocal.common.json_text import to_json
from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
from argolocal.errors import ArgolocalError, ConfigError, describe
from argolocal.interfaces import Cluster
from argolocal.language import kubectl_path
from argolocal.language.selector import SelectorError, evaluate_conditions, selects
from argolocal.language.yaml_text import parse_one
from argolocal.manifest.allowed_values import VERSIONED_KINDS
from argolocal.manifest.patch import PATCH_FUNCTIONS, PatchError
from argolocal.manifest.read import ObjectIdentity, generate_suffix
from argolocal.manifest.types import Object

# flags with a value that are accepted and ignored
FLAGS_WITH_VALUE = ("-n", "--namespace", "--field-manager", "--grace-period", "--timeout")
# other flags that are accepted; only --ignore-not-found has an effect
ACCEPTED_FLAGS = (
    "--validate",
    "--cascade",
    "--wait",
    "--force",
    "--now",
    "--ignore-not-found",
    "--overwrite",
    "--server-side",
)
# start of kubectl's message for the action `create`
ALREADY_EXISTS_MESSAGE = (
    'Error from server (AlreadyExists): error when creating "/tmp/manifest.yaml":'
)
# built-in kinds of Kubernetes, in contrast to custom resources
CORE_KINDS = (
    "ConfigMap",
    "Secret",
    "HorizontalPodAutoscaler",
    "PodDisruptionBudget",
    "Deployment",
    "Service",
)
# kinds whose objects do not have processes, so nothing is cleaned up after a crash of the runner
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

    action: StartPod
    kind: str
    name: str


class Resources:
    """The resource templates of one run. Controllers are created on first use."""

    def __init__(self, cluster: Cluster, workflow: dict[str, Any], run_directory: Path) -> None:
        self.cluster = cluster
        self.workflow = workflow
        self.run = run_directory
        self.controllers: dict[str, Any] = {}
        self.waiting: dict[str, WaitingNode] = {}

    @property
    def busy(self) -> bool:
        """True if controllers are in use, so that `poll` must be called every 0.1 s."""
        return bool(self.controllers)

    def start(self, action: StartPod) -> list[PodStarted | PodEnded]:
        """Perform the action of a node's resource template. If the object does not meet its
        conditions yet, a later call of `poll` completes the node."""
        resource = action.template["resource"]

        conditions = resource.get("successCondition") or resource.get("failureCondition")
        if resource["action"] == "delete" and (
            conditions or (action.template.get("outputs") or {}).get("parameters")
        ):
            unsupported_message = (
                "successCondition, failureCondition and outputs are not supported for delete action"
            )
            return [PodStarted(action.id), _make_failure_event(action.id, unsupported_message)]

        try:
            kind, name = self._perform(resource, self.run / "creates" / action.id)
        except (KubectlError, ArgolocalError) as error:
            return [
                PodStarted(action.id),
                _make_failure_event(action.id, f"no more retries {error}"),
            ]

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
                events += self._fail_waiting_nodes(controller, error)

        for waiting_node in list(self.waiting.values()):
            try:
                events += self._check_conditions(waiting_node)
            except Exception as error:
                self.forget(waiting_node.action.id)
                events.append(PodEnded(waiting_node.action.id, "Error", describe(error)))

        return events

    def _fail_waiting_nodes(self, controller: Any, error: Exception) -> list[PodStarted | PodEnded]:
        """Return an Error event for each node that waits for an object of `controller`, whose
        `poll` has failed."""
        waiting_node_ids = [
            node_id
            for node_id, waiting_node in self.waiting.items()
            if self.controllers.get(waiting_node.kind) is controller
        ]
        for node_id in waiting_node_ids:
            self.forget(node_id)
        return [
            PodEnded(node_id, "Error", f"{controller.kind}: {describe(error)}")
            for node_id in waiting_node_ids
        ]

    def overdue_nodes(self, now: float) -> list[str]:
        """Return the ids of the waiting nodes whose deadline has passed."""
        return [
            node_id
            for node_id, waiting_node in self.waiting.items()
            if waiting_node.action.deadline and now >= waiting_node.action.deadline
        ]

    def forget(self, node_id: str) -> None:
        """Stop watching the object of a node, without deleting the object."""
        self.waiting.pop(node_id, None)

    def clean_up(self) -> None:
        """Remove files that completed jobs left because their runner died."""
        # the names of StoredObjects' files begin with a dot
        stored_kinds = {folder.name for folder in (self.cluster.home / "objects").glob("[!.]*")}
        # skip the kinds that are not stored: the import of a controller takes time
        for kind in stored_kinds - {*CORE_KINDS, *PASSIVE_KINDS}:
            self._controller(kind).clean_up()

    def stop(self, grace_seconds: float) -> None:
        """Stop waiting for conditions, and stop the processes of jobs."""
        self.waiting.clear()
        for controller in set(self.controllers.values()):
            controller.stop(grace_seconds)

    def _controller(self, kind: str) -> Any:
        """Return the controller of a kind, and create all controllers on the first call. Raises
        KubectlError for an unsupported kind."""
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

    def _perform(self, resource: dict[str, Any], record_file: Path) -> tuple[str, str]:
        """Perform the action of a resource template. Return kind and name of the object.

        The file `record_file` stores the name of the created object or the patched object, so that
        a restarted runner does not repeat the action. Raises KubectlError, ConfigError.
        """
        kubectl_action = resource["action"]
        merge_strategy = _find_merge_strategy(resource)
        kubernetes_object = self._parse_manifest(resource) if resource.get("manifest") else {}
        positional_arguments, selector = parse_flags(resource.get("flags") or [])

        if kubectl_action == "delete" and not kubernetes_object:
            if selector and len(positional_arguments) == 1:
                return self._delete_selected(positional_arguments[0], selector)
            if len(positional_arguments) == 2:
                return self._delete_named(
                    positional_arguments[0].split(","), positional_arguments[1]
                )

        _check_manifest_types(kubernetes_object, merge_strategy)
        if kubectl_action == "create":
            _generate_name(kubernetes_object, record_file)

        kind, name = self._find_target(resource, kubernetes_object, positional_arguments)
        controller = self._controller(kind)
        is_missing = controller.get(name) is None

        if kubectl_action in ("get", "patch", "replace") and is_missing:
            if kubectl_action == "get" and _ignores_missing_object(resource):
                return kind, ""
            raise KubectlError(f'Error from server (NotFound): {kind.lower()}s "{name}" not found')

        if kubectl_action == "delete":
            if not is_missing:
                controller.delete(name)
        elif kubectl_action == "patch":
            self._patch(controller, name, kubernetes_object, merge_strategy, record_file)
        elif kubectl_action == "create":
            if not is_missing and not record_file.exists():
                raise KubectlError(
                    f'{ALREADY_EXISTS_MESSAGE} {kind.lower()}s "{name}" already exists'
                )

            record_file.parent.mkdir(exist_ok=True)
            write_atomically(record_file, name)
            controller.apply(kubernetes_object)
        elif kubectl_action != "get":
            controller.apply(kubernetes_object)

        return kind, name

    def _find_target(
        self, resource: dict[str, Any], kubernetes_object: Any, positional_arguments: list[str]
    ) -> tuple[str, str]:
        """Return kind and name of the object that a template names in its manifest or its flags.
        Raises KubectlError."""
        flags = resource.get("flags") or []
        merge_strategy = _find_merge_strategy(resource)

        # the operations of a JSON patch never name an object; another patch may contain only the
        # changes, without the object's kind
        needs_flags = merge_strategy == "json" or (
            merge_strategy and flags and not kubernetes_object.get("kind")
        )

        if not kubernetes_object or needs_flags:
            if len(positional_arguments) != 2:
                raise KubectlError(f"flags {flags} must name a kind and an object")

            kind = self._resolve_kind(positional_arguments[0])
            name = positional_arguments[1]
        else:
            kind = kubernetes_object.get("kind", "")
            name = (kubernetes_object.get("metadata") or {}).get("name", "")

        if not kind or not name:
            raise KubectlError(
                "Kind and name are both required but at least one of them is missing from the"
                " manifest"
            )
        return kind, name

    def _patch(
        self, controller: Any, name: str, patch: Any, merge_strategy: str, record_file: Path
    ) -> None:
        """Patch an object exactly once, even if the runner dies and restarts. A second patch could
        fail or have another result."""

        def update(current_object: Object) -> Object:
            # Kubernetes does not support strategic merge patches of custom resources
            if merge_strategy == "strategic" and current_object["kind"] not in CORE_KINDS:
                raise KubectlError(
                    "error from server (UnsupportedMediaType): the body of the request was in an"
                    " unknown format - accepted media types include: application/json-patch+json,"
                    " application/merge-patch+json"
                )

            if record_file.exists() and _patchable_fields(current_object) == json.loads(
                record_file.read_text()
            ):
                return current_object

            try:
                new_object = apply_patch(current_object, patch, merge_strategy)
            except PatchError as error:
                raise KubectlError(
                    f"The request is invalid: the server rejected our request: {error}"
                ) from None

            record_file.parent.mkdir(exist_ok=True)
            write_atomically(record_file, to_json(_patchable_fields(new_object)))
            return new_object

        controller.patch(name, update)

    def _parse_manifest(self, resource: dict[str, Any]) -> Any:
        """Return the object or the patch in a manifest. With `setOwnerReference`, the workflow
        becomes an owner of the object. Raises KubectlError."""
        manifest_text = resource["manifest"]
        try:
            # kubectl parses a patch that starts with { as JSON
            if resource["action"] == "patch" and manifest_text.lstrip()[:1] == "{":
                json.loads(manifest_text)
        except json.JSONDecodeError as error:
            raise KubectlError(
                f"Error from server (BadRequest): error decoding patch: {error}"
            ) from None
        except (ValueError, RecursionError):
            # parse_one, called below, reports the limit that the text exceeds
            pass

        try:
            kubernetes_object = parse_one(manifest_text, "the manifest")
        except ConfigError as error:
            raise KubectlError(str(error)) from None

        if (
            isinstance(kubernetes_object, dict)
            and _has_kind_and_metadata(kubernetes_object)
            and resource.get("setOwnerReference")
        ):
            metadata = self.workflow["metadata"]
            owner_reference = {
                "apiVersion": self.workflow["apiVersion"],
                "kind": "Workflow",
                "controller": True,
                "name": metadata["name"],
                "uid": metadata["uid"],
                "blockOwnerDeletion": True,
            }

            owner_references = kubernetes_object.setdefault("metadata", {}).setdefault(
                "ownerReferences", []
            )
            owner_references.append(owner_reference)

        return kubernetes_object

    def _resolve_kind(self, resource_type: str) -> str:
        """Return the kind of a resource type of kubectl, such as `pod`, `pods` or
        `deployments.apps`."""
        self._controller("ConfigMap")
        kind_by_type_name = {
            type_name: kind
            for kind in self.controllers
            for type_name in (kind.lower(), kind.lower() + "s")
        }
        return kind_by_type_name.get(resource_type.lower().split(".")[0], resource_type)

    def _delete_named(self, kinds: list[str], name: str) -> tuple[str, str]:
        """For each of the kinds, delete the object called `name` if it exists. Return the first of
        the kinds, and the name."""
        for kind in map(self._resolve_kind, kinds):
            controller = self._controller(kind)
            if controller.get(name) is not None:
                controller.delete(name)
        return self._resolve_kind(kinds[0]), name

    def _delete_selected(self, resource_type: str, selector: str) -> tuple[str, str]:
        """Delete the objects whose labels match the selector. Return the kind of the deleted
        objects, and the name ""."""
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

    def _check_conditions(self, waiting_node: WaitingNode) -> list[PodStarted | PodEnded]:
        """Return the event that ends the node if its object has met a condition or was deleted, and
        stop watching the object. Return [] if the node must wait longer."""
        resource = waiting_node.action.template["resource"]
        node_id = waiting_node.action.id

        kubernetes_object = self._controller(waiting_node.kind).get(waiting_node.name)
        if kubernetes_object is None:
            self.forget(node_id)
            message = (
                "The resource has been deleted while its status was still being checked. Will not"
                " be retried"
            )
            return [_make_failure_event(node_id, message)]

        try:
            has_succeeded, reason = evaluate_conditions(
                kubernetes_object,
                resource.get("successCondition") or "",
                resource.get("failureCondition") or "",
            )
        except SelectorError as error:
            has_succeeded = False
            reason = f"condition failed to parse: {error}"

        if has_succeeded is None:
            return []

        self.forget(node_id)
        if has_succeeded:
            return [self._make_success_event(waiting_node)]

        cause = _find_reported_cause(kubernetes_object)
        return [_make_failure_event(node_id, f"{reason}: {cause}" if cause else reason)]

    def _make_success_event(self, waiting_node: WaitingNode) -> PodEnded:
        """Return the event that ends the node successfully, with the output parameters that its
        template reads from the object."""
        outputs: dict[str, Any] = {"exitCode": "0"}
        kubernetes_object = (
            self._controller(waiting_node.kind).get(waiting_node.name)
            if waiting_node.name
            else None
        ) or {}

        for parameter in (waiting_node.action.template.get("outputs") or {}).get(
            "parameters"
        ) or []:
            value = parameter.get("value")
            json_path = (parameter.get("valueFrom") or {}).get("jsonPath")

            if not waiting_node.name:  # the flag --ignore-not-found allows the object to be missing
                value = parameter["valueFrom"].get("default", "")
            elif json_path:
                try:
                    value = kubectl_path.render_template(kubernetes_object, json_path)
                except kubectl_path.KubectlPathError as error:
                    return _make_failure_event(
                        waiting_node.action.id,
                        f'error executing jsonpath "{json_path}": Error executing template:'
                        f" {error}",
                    )

            outputs.setdefault("parameters", []).append({**parameter, "value": value})

        return PodEnded(waiting_node.action.id, "Succeeded", "", outputs)


def _find_reported_cause(kubernetes_object: Object) -> str:
    """Return the message of the status condition that reports the failure of an object, or ""."""
    status = kubernetes_object.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    failed_conditions = [
        condition
        for condition in conditions or []
        if (condition.get("type"), condition.get("status")) in FAILURE_CONDITIONS
        and condition.get("message")
    ]
    if failed_conditions:
        return str(failed_conditions[-1]["message"])
    return ""


def _find_merge_strategy(resource: dict[str, Any]) -> str:
    """Return the strategy of the action `patch`, or "" for another action."""
    if resource["action"] == "patch":
        return resource.get("mergeStrategy") or "strategic"
    return ""


def _ignores_missing_object(resource: dict[str, Any]) -> bool:
    """Return True if the flags allow the object to be missing."""
    return "--ignore-not-found" in " ".join(resource.get("flags") or []).split()


def _check_manifest_types(kubernetes_object: object, merge_strategy: str) -> None:
    """Raise KubectlError if a manifest is not an object, or if its kind or metadata has a wrong
    type. Only the manifest of a JSON patch may be a list."""
    if merge_strategy != "json" and not isinstance(kubernetes_object, dict):
        raise KubectlError("the manifest does not contain an object")

    if isinstance(kubernetes_object, dict) and not _has_kind_and_metadata(kubernetes_object):
        raise KubectlError(
            "error validating data: kind must be text, and metadata must be a mapping"
        )


def _generate_name(kubernetes_object: Object, record_file: Path) -> None:
    """Set the name of an object that has only a `generateName`. If `record_file` exists, the object
    gets the name in this file, which an earlier attempt has generated."""
    metadata = kubernetes_object.get("metadata") or {}
    if metadata.get("name") or not metadata.get("generateName"):
        return

    if record_file.exists():
        name = record_file.read_text()
    else:
        identity = ObjectIdentity(suffix=generate_suffix())
        name = identity.name(str(metadata["generateName"]))

    kubernetes_object["metadata"] = {**metadata, "name": name}


def _has_kind_and_metadata(kubernetes_object: Object) -> bool:
    """Return True if an object's kind and metadata have the right types or are missing."""
    return isinstance(kubernetes_object.get("kind") or "", str) and isinstance(
        kubernetes_object.get("metadata") or {}, dict
    )


def parse_flags(flags: list[str]) -> tuple[list[str], str]:
    """Return the positional arguments and the label selector of `flags`. Raises KubectlError for a
    flag that is not supported here."""
    positional_arguments = []
    selector = ""

    remaining_words = iter([word for flag in flags for word in flag.split()])
    for word in remaining_words:
        flag, equals_sign, value = word.partition("=")
        if not word.startswith("-"):
            positional_arguments += [name for name in word.split("/") if name]
        elif flag in ("-l", "--selector"):
            selector = value if equals_sign else next(remaining_words, "")
        elif flag in FLAGS_WITH_VALUE:
            if not equals_sign:
                next(remaining_words, "")
        elif flag not in ACCEPTED_FLAGS:
            supported_flags = ", ".join(("--selector", *FLAGS_WITH_VALUE, *ACCEPTED_FLAGS))
            raise KubectlError(
                f"the flag {flag} is not supported here: the supported flags are {supported_flags}"
            )

    return positional_arguments, selector


def apply_patch(kubernetes_object: Object, patch: object, merge_strategy: str) -> Object:
    """Return the object with the patch applied; its status is not changed. Raises PatchError."""
    status = {"status": kubernetes_object["status"]} if "status" in kubernetes_object else {}
    return (
        PATCH_FUNCTIONS[merge_strategy](
            {key: value for key, value in kubernetes_object.items() if key != "status"}, patch
        )
        | status
    )


def _patchable_fields(kubernetes_object: Object) -> Object:
    """Return the object without its status, resourceVersion and generation, which a patch does not
    set."""
    counter_fields = ("resourceVersion", "generation")
    metadata = {
        key: value
        for key, value in kubernetes_object["metadata"].items()
        if key not in counter_fields
    }
    return {key: value for key, value in kubernetes_object.items() if key != "status"} | {
        "metadata": metadata
    }


def _make_failure_event(node_id: str, reason: str) -> PodEnded:
    exit_code = exit_codes.EXECUTOR_ERROR
    message = f"main: Error (exit code {exit_code}): {reason}"
    return PodEnded(node_id, "Failed", message, {"exitCode": str(exit_code)})
