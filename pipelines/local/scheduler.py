"""The state machine of a workflow: (nodes, events, now) → (nodes, actions). No clock, no I/O, nothing of its own but `status`.

    scheduler = Scheduler(workflow, status={})
    actions = scheduler.advance(now, events)      # `status` is Argo's WorkflowStatus as plain data

Each call walks the templates from the entrypoint over the table of nodes, as Argo's controller does, so a table read from
disk goes on where it was. Source: Argo's workflow/controller/operator.go, exec_control.go, exit_handler.go (v4.1).
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from pipelines.local import golang, retries
from pipelines.local.expr import truth
from pipelines.local.functions import ExprError
from pipelines.local.scope import ABSENT, MARK, Scope, absent_arguments, artifact_of, node_outputs
from pipelines.local.template import Missing, TemplateError, expanded, substitute
from pipelines.local.when import WhenError

Node = dict[str, Any]
FULFILLED = {"Succeeded", "Failed", "Error", "Skipped", "Omitted"}
COMPLETED = {"Succeeded", "Failed", "Error"}
FAILED = {"Failed", "Error"}
LEAVES = ("container", "script", "resource")
STRFTIME = "BbmAadHIMSYypZzL"
WORKFLOW_PHASE = {"Skipped": "Succeeded", "Omitted": "Succeeded"}


class NodeError(Exception):
    """This node cannot go on; its message is Argo's."""


class Parallel(Exception):
    """A limit on parallelism is reached: nothing is wrong, try again later."""


class TimedOut(NodeError):
    """The node's `timeout` passed before it could run."""


@dataclass(frozen=True)
class Start:
    """Run this node's pod. `deadline`: kill it then (unix seconds)."""

    id: str
    pod: str
    template: dict[str, Any]
    capture: bool = False  # stdout is an output
    deadline: float | None = None


@dataclass(frozen=True)
class Kill:
    """The node is failed already: end its pod."""

    id: str


@dataclass(frozen=True)
class Began:
    """The pod's process runs."""

    id: str
    ip: str = ""


@dataclass(frozen=True)
class Ended:
    """The pod is over and its outputs are collected."""

    id: str
    phase: str
    message: str = ""
    outputs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Options:
    """How a template is entered."""

    boundary: str = ""
    on_exit: bool = False
    kind: str = "steps"  # what the caller is called in tags: tasks or steps
    deadline: float | None = None
    flag: dict[str, bool] = field(default_factory=dict)


@lru_cache(65536)
def hashed(name: str) -> int:
    """fnv32a, as in node ids and pod names."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def stamp(now: float) -> str:
    """Unix seconds → RFC 3339 (Argo keeps whole seconds; here milliseconds, for durations of local steps)."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@lru_cache(4096)
def moment(text: str) -> float:
    """RFC 3339 → unix seconds."""
    return datetime.fromisoformat(text).timestamp()


class Scheduler:
    """One workflow. `changed` collects the ids of nodes that differ since the caller last cleared it."""

    def __init__(self, workflow: dict[str, Any], status: dict[str, Any] | None = None, shutdown: str = "") -> None:
        self.workflow, self.spec, self.shutdown = workflow, workflow["spec"], shutdown
        self.name: str = workflow["metadata"]["name"]
        self.templates = {each["name"]: each for each in self.spec.get("templates", [])}
        self.status: dict[str, Any] = status or {"phase": "", "nodes": {}}
        self.nodes: dict[str, Node] = self.status["nodes"]
        self.ids = {node["name"]: id for id, node in self.nodes.items()}
        self.active = {id for id, node in self.nodes.items() if node["type"] == "Pod" and node["phase"] not in FULFILLED}
        self.started: set[str] = set()  # pods that this process was told to start
        self.changed: set[str] = set()
        self.actions: list[Start | Kill] = []
        self.memory: dict[str, Any] = {}  # derived from the nodes: what has been substituted and expanded
        self.now, self.wake, self.again, self.stuck = 0.0, None, False, ""
        self.globals = self._globals()

    # ---- the outside -------------------------------------------------------------------------------------------------

    def advance(self, now: float, events: Iterable[Began | Ended] = ()) -> list[Start | Kill]:
        """Takes what happened, decides what is to be done. `wake` is when to call again at the latest."""
        self.now, self.wake, self.actions = now, None, []
        if not self.status["phase"]:
            self.status |= {"phase": "Running", "startedAt": stamp(now)}
        for event in events:
            self._apply(event)
        self._control()
        self.again = True
        while self.again and self.status["phase"] == "Running":
            self.again, self.stuck = False, ""
            self._operate()
        if self.status["phase"] == "Running" and not self.active and self.wake is None:
            self._finish("Error", f"{self.stuck or 'nothing is left to run'}: Argo would wait for it for ever")
        if self.deadline and self.status["phase"] == "Running" and now < self.deadline:
            self.wake_at(self.deadline)
        return self.actions

    @property
    def done(self) -> bool:
        return self.status["phase"] in COMPLETED

    @property
    def deadline(self) -> float | None:
        seconds = self.spec.get("activeDeadlineSeconds")
        return moment(self.status["startedAt"]) + int(seconds) if seconds is not None else None

    def wake_at(self, when: float) -> None:
        self.wake = when if self.wake is None else min(self.wake, when)

    def _apply(self, event: Began | Ended) -> None:
        node = self.nodes[event.id]
        if node["phase"] in FULFILLED:
            return
        if isinstance(event, Began):
            self.mark(node["name"], "Running", "")
            return
        if event.outputs is not None:
            node["outputs"] = event.outputs
            self.export(event.outputs)
        self.mark(node["name"], event.phase, event.message)

    def _control(self) -> None:
        """Ends what a shutdown or the workflow's deadline forbids."""
        late = bool(self.deadline and self.now >= self.deadline)
        if not (late or self.shutdown):
            return
        for id, node in list(self.nodes.items()):
            if node["phase"] in FULFILLED or node["type"] not in ("Pod", "Suspend"):
                continue
            exiting = self.on_exit(node)
            if self.shutdown and not self.may_run(exiting):
                suspended = node["type"] == "Suspend"
                how = "Stopped with strategy '{}'" if suspended else "workflow shutdown with strategy:  {}"
                self.mark(node["name"], "Failed", how.format(self.shutdown))
            elif late and not exiting:
                self.mark(node["name"], "Failed", "Step exceeded its deadline")
            else:
                continue
            self.actions.append(Kill(id))

    def may_run(self, on_exit: bool) -> bool:
        return not self.shutdown or (self.shutdown == "Stop" and on_exit)

    def on_exit(self, node: Node) -> bool:
        """Whether a node belongs to an exit handler."""
        return ".onExit" in node["name"]

    def _operate(self) -> None:
        try:
            node = self.execute(self.name, {"template": self.spec["entrypoint"]}, self.arguments(), Options())
        except Parallel:
            return
        except NodeError as error:
            self._finish("Error", f"error in entry template execution: {error}")
            return
        if node is None:
            return
        phase = WORKFLOW_PHASE.get(node["phase"], node["phase"])
        self.globals["workflow.status"] = phase
        self.globals["workflow.failures"] = json.dumps(golang.dumps(self._failures()))
        if node["phase"] not in FULFILLED:
            return
        exit_node = None
        if hook := self.exit_hook():
            name = f"{self.name}.onExit"
            if self.get(name) or self.may_run(True):
                try:
                    options = Options(on_exit=True, flag={"hooked": True})
                    exit_node = self.execute(name, hook, hook.get("arguments") or {}, options)
                except Parallel:
                    return
                except NodeError as error:
                    self._finish("Error", f"error in exit template execution : {error}")
                    return
                if not exit_node or exit_node["phase"] not in FULFILLED:
                    return
        message = node.get("message", "")
        if phase in FAILED and self.shutdown:
            message = f"Stopped with strategy '{self.shutdown}'"
        if phase == "Succeeded" and exit_node and exit_node["phase"] in FAILED:
            phase, message = exit_node["phase"], exit_node.get("message", "")
        self._finish(phase, message if phase in FAILED else "")

    def exit_hook(self) -> dict[str, Any] | None:
        """The workflow's exit handler, whose arguments default to the workflow's."""
        hook = (self.spec.get("hooks") or {}).get("exit")
        if hook:
            return {**hook, "arguments": hook.get("arguments") or self.arguments()}
        return {"template": self.spec["onExit"], "arguments": self.arguments()} if self.spec.get("onExit") else None

    def arguments(self) -> dict[str, Any]:
        """The workflow's arguments, with the values of those that come from elsewhere."""
        arguments = self.spec.get("arguments") or {}
        values = [
            {"name": each["name"], "value": self.globals[f"workflow.parameters.{each['name']}"]}
            for each in arguments.get("parameters") or []
        ]
        return {**arguments, "parameters": values}

    def _finish(self, phase: str, message: str) -> None:
        self.status |= {"phase": phase, "message": message, "finishedAt": stamp(self.now)}

    def _failures(self) -> list[dict[str, Any]]:
        return [
            {
                "displayName": node["displayName"],
                "message": node.get("message", ""),
                "templateName": node.get("templateName", ""),
                "phase": node["phase"],
                "podName": self.pod_name(node["name"], node.get("templateName", "")),
                "finishedAt": node.get("finishedAt"),
            }
            for node in self.nodes.values()
            if node["phase"] in FAILED
        ]

    # ---- the table ---------------------------------------------------------------------------------------------------

    def id(self, name: str) -> str:
        return name if name == self.name else f"{self.name}-{hashed(name)}"

    def pod_name(self, name: str, template: str) -> str:
        prefix = f"{self.name}-{template}" if template else self.name
        return self.name if name == self.name else f"{prefix[:242]}-{hashed(name)}"

    def get(self, name: str) -> Node | None:
        id = self.ids.get(name)
        return self.nodes[id] if id is not None else None

    def create(self, name: str, type: str, phase: str, holder: dict[str, Any], options: Options, message: str = "") -> Node:
        """A new node. Its times are now; what is created fulfilled is finished too."""
        boundary = self.nodes.get(options.boundary)
        shown = name[len(boundary["name"]) :] if boundary else name
        node: Node = {
            "id": self.id(name),
            "name": name,
            "displayName": re.sub(r"^(\[\d+\])?\.|^\.", "", shown) if boundary else name,
            "type": type,
            "templateName": holder.get("template", ""),
            "templateScope": f"local/{self.name}",
            "phase": phase,
            "startedAt": stamp(self.now),
            "finishedAt": stamp(self.now) if phase in FULFILLED else None,
        }
        node |= {"boundaryID": options.boundary} if options.boundary else {}
        node |= {"message": message} if message else {}
        node |= {"nodeFlag": dict(options.flag)} if options.flag else {}
        self.nodes[node["id"]] = node
        self.ids[name] = node["id"]
        self.changed.add(node["id"])
        self.again |= phase in FULFILLED
        if type == "Pod":
            self.active.add(node["id"])
        return node

    def mark(self, name: str, phase: str, message: str | None = None) -> Node:
        """Sets phase and message, and the end when there is one."""
        node = self.nodes[self.ids[name]]
        if node["phase"] != phase or (message is not None and message != node.get("message", "")):
            self.changed.add(node["id"])
        self.again |= phase in FULFILLED and node["phase"] not in FULFILLED
        node["phase"] = phase
        if message is not None:
            node["message"] = message
            if not message:
                del node["message"]
        if phase in FULFILLED:
            node["finishedAt"] = node.get("finishedAt") or stamp(self.now)
            self.active.discard(node["id"])
        return node

    def error(self, name: str, holder: dict[str, Any], options: Options, message: str) -> Node:
        """The node in phase Error, whether it exists or not."""
        if self.get(name):
            return self.mark(name, "Error", message)
        return self.create(name, "Skipped", "Error", holder, options, message)

    def child(self, parent: str, name: str) -> None:
        node = self.nodes[self.ids[parent]]
        children = node.setdefault("children", [])
        if self.id(name) not in children:
            children.append(self.id(name))
            self.changed.add(node["id"])

    def outbound(self, id: str) -> list[str]:
        """The nodes that whatever comes after node `id` hangs on."""
        node = self.nodes[id]
        if node["type"] in ("Pod", "Skipped", "Suspend"):
            return [id]
        if node["type"] == "Retry" and node.get("children"):
            return [node["children"][-1]]
        if node["type"] == "TaskGroup":
            return [out for each in node.get("children", []) for out in self.outbound(each)] or [id]
        return [out for each in node.get("outboundNodes", []) for out in self.outbound(each)]

    def attempts(self, node: Node) -> list[Node]:
        """The attempts of a Retry node, without its hooks."""
        found = (self.nodes[id] for id in node.get("children", []) if id in self.nodes)
        return [each for each in found if not each.get("nodeFlag", {}).get("hooked")]

    def last(self, node: Node) -> Node:
        """A Retry node's last attempt; any other node itself."""
        attempts = self.attempts(node) if node["type"] == "Retry" else []
        return attempts[-1] if attempts else node

    def hooks_done(self, node: Node) -> bool:
        children = (self.nodes[id] for id in node.get("children", []) if id in self.nodes)
        return all(each["phase"] in FULFILLED for each in children if each.get("nodeFlag", {}).get("hooked"))

    def count(self, boundary: str, phases: Iterable[str]) -> int:
        return sum(
            node.get("boundaryID") == boundary and node["phase"] in phases and node["type"] in ("Pod", "Steps", "DAG")
            for node in self.nodes.values()
        )

    # ---- values ------------------------------------------------------------------------------------------------------

    def _globals(self) -> dict[str, str]:
        meta, spec = self.workflow["metadata"], self.spec
        created = datetime.fromisoformat(meta["creationTimestamp"])
        parameters = (spec.get("arguments") or {}).get("parameters") or []
        found = {
            "name": self.name,
            "namespace": meta.get("namespace", "default"),
            "uid": meta.get("uid", ""),
            "mainEntrypoint": spec.get("entrypoint", ""),
            "serviceAccountName": spec.get("serviceAccountName", ""),
            "creationTimestamp": meta["creationTimestamp"],
            "creationTimestamp.s": str(int(created.timestamp())),
            "creationTimestamp.RFC3339": meta["creationTimestamp"],
            "status": self.status["phase"] or "Running",
            "duration": "0.000000",
        }
        found |= {f"creationTimestamp.{c}": created.strftime(f"%{c}" if c != "L" else "000") for c in STRFTIME}
        found |= {"priority": str(spec["priority"])} if spec.get("priority") is not None else {}
        found |= {f"parameters.{each['name']}": each["value"] for each in parameters if "value" in each}
        for key, value in (("parameters", parameters), *((k, meta.get(k) or {}) for k in ("labels", "annotations"))):
            found |= {key: golang.dumps(value), f"{key}.json": golang.dumps(value)}
            found |= {f"{key}.{name}": text for name, text in value.items()} if isinstance(value, dict) else {}
        outputs = (self.status.get("outputs") or {}).get("parameters") or []
        found |= {f"outputs.parameters.{each['name']}": each["value"] for each in outputs}
        return {f"workflow.{key}": value for key, value in found.items()}

    def export(self, outputs: dict[str, Any]) -> None:
        """Outputs with a globalName become the workflow's."""
        for kind in ("parameters", "artifacts"):
            for each in outputs.get(kind) or []:
                name = each.get("globalName")
                if not name or (kind == "parameters" and "value" not in each):
                    continue
                kept = self.status.setdefault("outputs", {}).setdefault(kind, [])
                entry = {**{k: v for k, v in each.items() if k not in ("globalName", "valueFrom", "path")}, "name": name}
                kept[:] = [old for old in kept if old["name"] != name] + [entry]
                if kind == "parameters":
                    self.globals[f"workflow.outputs.parameters.{name}"] = each["value"]

    def template(self, holder: dict[str, Any]) -> dict[str, Any]:
        """The template that a step, task or hook names. Raises NodeError."""
        if holder.get("inline"):
            return {"name": "", **holder["inline"]}
        found = self.templates.get(holder.get("template", ""))
        if not found:
            raise NodeError(f"template {holder.get('template')} not found in workflow template")
        return found

    def processed(self, template: dict[str, Any], arguments: dict[str, Any], local: dict[str, str]) -> dict[str, Any]:
        """The template with its inputs filled in and its tags replaced. Raises NodeError."""
        given = {each["name"]: each for each in arguments.get("parameters") or []}
        files = {each["name"]: each for each in arguments.get("artifacts") or []}
        inputs = template.get("inputs") or {}
        parameters = [self._input(each, given.get(each["name"])) for each in inputs.get("parameters") or []]
        artifacts = [_artifact(each, files.get(each["name"])) for each in inputs.get("artifacts") or []]
        filled = {**template, "inputs": {"parameters": parameters, "artifacts": artifacts}}
        return self.substituted(filled, local)

    def _input(self, parameter: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
        value = parameter.get("value", parameter.get("default"))
        if given is not None:
            if given.get("value") == ABSENT:
                if value is None:
                    raise NodeError(
                        f"inputs.parameters.{parameter['name']}: argument references an absent optional "
                        "(skipped/omitted node output with no default)"
                    )
            else:
                value = given.get("value")
        if value is None:
            raise NodeError(f"inputs.parameters.{parameter['name']} was not supplied")
        return {**{k: v for k, v in parameter.items() if k != "valueFrom"}, "value": value}

    def substituted(self, template: dict[str, Any], local: dict[str, str]) -> dict[str, Any]:
        """Globals and locals first, then the inputs, as values may hold tags themselves. Raises NodeError."""
        scope: dict[str, str | None] = {**self.globals, **local}
        try:
            template = substitute(template, scope)
            scope |= {f"inputs.parameters.{each['name']}": each["value"] for each in template["inputs"]["parameters"]}
            scope["inputs.parameters"] = golang.dumps(template["inputs"]["parameters"])
            outputs = template.get("outputs") or {}
            for way, files in (("inputs", template["inputs"]["artifacts"]), ("outputs", outputs.get("artifacts") or [])):
                scope |= {f"{way}.artifacts.{each['name']}.path": MARK + each["path"] for each in files if each.get("path")}
            for each in outputs.get("parameters") or []:
                if path := (each.get("valueFrom") or {}).get("path"):
                    scope[f"outputs.parameters.{each['name']}.path"] = MARK + path
            return substitute(template, scope)
        except TemplateError as error:
            raise NodeError(str(error)) from None

    # ---- templates ---------------------------------------------------------------------------------------------------

    def execute(
        self, name: str, holder: dict[str, Any], arguments: dict[str, Any], options: Options, retried: bool = False
    ) -> Node | None:
        """Brings node `name` as far as it can go now. Raises Parallel, NodeError (the node is marked then)."""
        node = self.get(name)
        if node and node["phase"] in FULFILLED:
            return node
        try:
            template = self.memory.get(name) or self._enter(name, holder, arguments, options)
        except NodeError as error:
            self.error(name, holder, options, str(error))
            raise
        if not retried and node and template.get("timeout") and node["phase"] == "Pending" and node["id"] not in self.started:
            self._check_timeout(node, template)
        self.limit(template, node, options.boundary)
        self.memory[name] = template
        strategy = template.get("retryStrategy") or self.spec.get("retryStrategy")
        if strategy and not retried:
            return self._retry(name, holder, template, strategy, options)
        try:
            return self._run(name, holder, template, options)
        except NodeError as error:
            self.error(name, holder, options, str(error))
            raise

    def _enter(self, name: str, holder: dict[str, Any], arguments: dict[str, Any], options: Options) -> dict[str, Any]:
        template = retries.with_defaults(self.template(holder), self.spec.get("templateDefaults"))
        local = {"node.name": name, f"{options.kind}.name": holder.get("name", "")}
        if any(kind in template for kind in LEAVES) and not (
            template.get("retryStrategy") or self.spec.get("retryStrategy")
        ):
            local["pod.name"] = self.pod_name(name, template["name"])
        return self.processed(template, arguments, local)

    def _check_timeout(self, node: Node, template: dict[str, Any]) -> None:
        if self.now > moment(node["startedAt"]) + golang.seconds(template["timeout"]):
            self.mark(node["name"], "Failed", "timeout")
            raise TimedOut("timeout")

    def limit(self, template: dict[str, Any], node: Node | None, boundary: str) -> None:
        """Raises Parallel where parallelism or failFast forbid going on."""
        if (limit := self.spec.get("parallelism")) is not None and len(self.active) >= int(limit):
            raise Parallel
        if node and ("dag" in template or "steps" in template):
            self._limited(node, template, node["id"])
        if boundary and (not node or node["phase"] not in ("Pending", "Running")):
            parent = self.nodes[boundary]
            self._limited(parent, self.memory.get(parent["name"], {}), boundary)

    def _limited(self, parent: Node, template: dict[str, Any], boundary: str) -> None:
        if template.get("failFast") is True and self.count(boundary, FAILED):
            if not any(self.nodes[id].get("boundaryID") == boundary for id in self.active):
                message = "template has failed or errored children and failFast enabled"
                groups = [n for n in self.nodes.values() if n.get("boundaryID") == boundary and n["type"] == "StepGroup"]
                if groups:
                    self.mark(groups[-1]["name"], "Failed", message)
                self.mark(parent["name"], "Failed", message)
            raise Parallel
        limit = template.get("parallelism")
        if limit is not None and self.count(boundary, ("Pending", "Running")) >= int(limit):
            raise Parallel

    def _retry(
        self, name: str, holder: dict[str, Any], template: dict[str, Any], strategy: dict[str, Any], options: Options
    ) -> Node | None:
        parent = self.get(name)
        if not parent:
            parent = self.create(name, "Retry", "Running", holder, options)
            _keep_inputs(parent, template)
        options = replace(options, flag={**options.flag, "retried": True})
        for _ in range(2):  # once more when an attempt ends at once
            attempts = self.attempts(parent)
            last = attempts[-1] if attempts else None
            if last and last["phase"] in FULFILLED:
                try:
                    step = retries.decide(self, parent, attempts, strategy)
                except (ExprError, ValueError) as error:
                    self.mark(name, "Error", str(error))
                    raise NodeError(str(error)) from None
                if step.phase:
                    if last.get("outputs") is not None:
                        parent["outputs"] = last["outputs"]
                    return self.mark(name, step.phase, step.message or None)
                self.mark(name, parent["phase"], step.message)
                if step.wait:
                    self.wake_at(step.wait)
                    return parent
                options = replace(options, deadline=step.deadline or options.deadline)
                last = None
            number = len(attempts) - (1 if last else 0)
            attempt = last["name"] if last else f"{name}({number})"
            if not last:
                before = attempts[-1] if attempts else None
                local = {"retries": str(number), "pod.name": self.pod_name(attempt, template["name"])}
                try:
                    self.memory[attempt] = self.substituted(template, local | retries.variables(before))
                except NodeError as error:
                    self.error(attempt, holder, options, str(error))
                    self.child(name, attempt)
                    raise
            elif attempt not in self.memory:
                before = attempts[-2] if len(attempts) > 1 else None
                local = {"retries": str(number), "pod.name": self.pod_name(attempt, template["name"])}
                self.memory[attempt] = self.substituted(template, local | retries.variables(before))
            try:
                child = self.execute(attempt, holder, {}, options, retried=True)
            except NodeError:
                child = self.get(attempt)
            if child:
                self.child(name, attempt)
            if not child or child["phase"] not in FULFILLED:
                return parent
        return parent

    def _run(self, name: str, holder: dict[str, Any], template: dict[str, Any], options: Options) -> Node | None:
        if "dag" in template:
            from pipelines.local import dag

            return dag.execute(self, name, holder, template, options)
        if "steps" in template:
            from pipelines.local import steps

            return steps.execute(self, name, holder, template, options)
        if "suspend" in template:
            return self._suspend(name, holder, template, options)
        if not any(kind in template for kind in LEAVES):
            raise NodeError(f"Template '{template['name']}' missing specification")
        return self._pod(name, holder, template, options)

    def _pod(self, name: str, holder: dict[str, Any], template: dict[str, Any], options: Options) -> Node:
        node = self.get(name)
        if not node:
            node = self.create(name, "Pod", "Pending", holder, options)
            _keep_inputs(node, template)
        if node["id"] in self.started:
            return node
        exiting = options.on_exit or self.on_exit(node)
        if not self.may_run(exiting):
            return self.mark(name, "Failed", f"workflow shutdown with strategy: {self.shutdown}")
        if self.deadline and self.now >= self.deadline and not exiting:
            return self.mark(name, "Failed", "Step exceeded its deadline")
        limits = [options.deadline] if options.deadline else []
        if (seconds := template.get("activeDeadlineSeconds")) is not None:
            limits.append(self.now + float(seconds))
        if template.get("timeout"):
            limits.append(moment(node["startedAt"]) + golang.seconds(template["timeout"]))
        pod = self.pod_name(name, template["name"])
        scope = {f"inputs.parameters.{each['name']}": each["value"] for each in template["inputs"]["parameters"]}
        try:
            final = substitute(template, {**self.globals, **scope, "pod.name": pod})
        except TemplateError as error:
            raise NodeError(str(error)) from None
        self.started.add(node["id"])
        deadline = min(limits) if limits else None
        self.actions.append(Start(node["id"], pod, final, self._captured(name, options.boundary), deadline))
        return node

    def _captured(self, name: str, boundary: str) -> bool:
        """Whether the parent's template mentions this step's outputs.result."""
        if not boundary:
            return False
        parent = self.memory.get(self.nodes[boundary]["name"], {})
        kind = "tasks" if "dag" in parent else "steps"
        task = re.escape(re.sub(r"(\([^()]*\)|\[[^\[\]]*\])+$", "", name).rpartition(".")[2])
        text = json.dumps(parent)
        return bool(re.search(rf"{kind}(\.{task}\.|\[(\\?[\'\"]){task}\\?[\'\"]\]\.)outputs\.result", text))

    def _suspend(self, name: str, holder: dict[str, Any], template: dict[str, Any], options: Options) -> Node:
        node = self.get(name)
        if not node:
            node = self.create(name, "Suspend", "Running", holder, options)
            _keep_inputs(node, template)
        until = moment(node["startedAt"]) + golang.seconds(str(template["suspend"]["duration"]))
        if self.now >= until:
            return self.mark(name, "Succeeded")
        self.wake_at(until)
        return node

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def exit_done(self, holder: dict[str, Any], node: Node, scope: Scope, options: Options) -> bool:
        """Runs the exit hook of a completed step or task; true when there is none or it is over. Raises NodeError."""
        hook = (holder.get("hooks") or {}).get("exit")
        if holder.get("onExit") and not hook:
            hook = {"template": holder["onExit"], "arguments": self.arguments()}
        if not hook or node["phase"] not in COMPLETED or not self.may_run(True):
            return True
        try:
            if hook.get("expression") and not truth(hook["expression"], expanded(scope.parameters(self.globals))):
                return True
            arguments = hook.get("arguments") or {}
            if arguments:
                node_outputs(scope, options.kind, holder["name"], self.last(node).get("outputs") or {})
                arguments = absent_arguments(scope, arguments)
                arguments = substitute(arguments, scope.parameters(self.globals))
                files = [artifact_of(scope, each) for each in arguments.get("artifacts") or []]
                arguments = {**arguments, "artifacts": [each for each in files if each]}
        except (TemplateError, ExprError) as error:
            raise NodeError(str(error)) from None
        name = f"{node['name']}.onExit"
        options = Options(options.boundary, True, "steps", flag={"hooked": True})
        try:
            done = self.execute(name, {"template": hook["template"]}, arguments, options)
        except Parallel:
            return False
        except NodeError:
            done = self.get(name)
        if done:
            self.child(node["name"], name)
        return bool(done and done["phase"] in FULFILLED)


def _artifact(artifact: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    located = has_location(artifact)
    if not artifact.get("optional") and not located:
        if given is None:
            raise NodeError(f"inputs.artifacts.{artifact['name']} was not supplied")
        if not has_location(given):
            raise NodeError(f"inputs.artifacts.{artifact['name']} missing location information")
    if given is None:
        return artifact
    # everything else, also archive and optional, is the argument's: Argo forgets what the input says
    return {**given} | {key: artifact[key] for key in ("name", "path", "mode", "recurseMode") if key in artifact}


def has_location(artifact: dict[str, Any]) -> bool:
    """Whether an artifact says where its bytes are."""
    return any(artifact.get(kind) for kind in ("s3", "raw", "http"))


def _keep_inputs(node: Node, template: dict[str, Any]) -> None:
    kept = {kind: values for kind, values in template["inputs"].items() if values}
    if kept:
        node["inputs"] = kept


ERRORS = (NodeError, TemplateError, WhenError, ExprError, Missing)
