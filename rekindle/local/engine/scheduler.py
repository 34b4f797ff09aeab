"""The state machine of a workflow: (nodes, events, now) → (nodes, actions), without a clock and without I/O.

    scheduler = Scheduler(workflow, status={})
    actions = scheduler.advance(now, events)      # `status` is Argo's WorkflowStatus as plain data

Each call walks the templates from the entrypoint over the table of nodes, as Argo's controller does, so a table read
from disk goes on where it was. Source: Argo's workflow/controller/operator.go, exec_control.go, exit_handler.go
(v4.1).
"""

import contextlib
import sys
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from rekindle.argo.kinds import COMPLETED, FAILED, FULFILLED
from rekindle.argo.manifest.resolve import called
from rekindle.local.engine import admission, attempts, dag, hooks, leaf_templates, steps, suspend
from rekindle.local.engine import retry as retries
from rekindle.local.engine.inputs import Values
from rekindle.local.engine.nodes import (
    Began,
    Crashed,
    Ended,
    Kill,
    Node,
    NodeError,
    Options,
    Parallel,
    Resumed,
    Start,
    TimedOut,
    moment,
    stamp,
)
from rekindle.local.locks import Shared
from rekindle.local.pods import volumes

DEPTH = 100  # templates in templates, of which each is a dozen calls here
TOO_DEEP = (
    "Maximum recursion depth exceeded. "
    "See https://argo-workflows.readthedocs.io/en/release-4.1/scaling/#maximum-recursion-depth"
)
sys.setrecursionlimit(max(sys.getrecursionlimit(), 30 * DEPTH))
Event = Began | Ended | Resumed
WORKFLOW_PHASE = {"Skipped": "Succeeded", "Omitted": "Succeeded"}


class Scheduler(Values):
    """One workflow. `shutdown` is "", Stop or Terminate; `shared` holds what it has in common with other runs."""

    def __init__(
        self,
        workflow: dict[str, Any],
        status: dict[str, Any] | None = None,
        shutdown: str = "",
        shared: Shared | None = None,
    ) -> None:
        super().__init__(workflow, status or {"phase": "", "nodes": {}})
        self.shutdown, self._shared = shutdown, shared
        self.holding: set[str] = set()  # nodes with locks
        self.leaked: set[str] = set()  # of those, what erred before it ran: Argo lets go when it looks at one again
        self.daemons = {id: None for id, node in self.nodes.items() if node.get("daemoned")}
        self.started: set[str] = set()  # pods that this process was told to start
        self.actions: list[Start | Kill] = []
        self.memory: dict[Any, Any] = {}  # derived from the nodes: what has been substituted and expanded
        self.entered: set[str] = set()  # nodes whose arguments have no error: that is told before a limit holds one up
        self.wake: float | None = None
        self.stuck, self.depth = "", 0

    def advance(self, now: float, events: Iterable[Event] = ()) -> list[Start | Kill]:
        """Takes what happened, decides what is to be done. `wake` is when to call again at the latest."""
        self.now, self.wake, self.actions = now, None, []
        if self.status["phase"]:
            self._tell_time()
        else:
            self.status |= {"phase": "Running", "startedAt": stamp(now)}
        if "volumeClaimTemplates" in self.spec and not self.done:
            self.status["persistentVolumeClaims"] = volumes.claims(self.workflow)
        for event in events:
            self._apply(event)
        if not admission.admitted(self):
            return []
        self._control()
        if self.spec.get("suspend") and not self.shutdown:
            return self.actions
        self.again = True
        while self.again and self.status["phase"] == "Running":
            self.again, self.stuck = False, ""
            admission.release(self)
            self._operate()
            if self.lost and not self.again and not self._goes_on(besides=self.lost):
                for node in [self.nodes[id] for id in self.lost]:
                    self._revive(node)
        if self.status["phase"] == "Running" and not self._goes_on():
            long = "until the deadline" if self.deadline else "for ever"
            message = f"{self.stuck or 'nothing is left to run'}: Argo would wait for it {long}"
            self.finish("Error", message, stuck=True)
        if self.deadline and self.status["phase"] == "Running" and now < self.deadline:
            self.wake_at(self.deadline)
        return self.actions

    def _revive(self, node: Node) -> None:
        """Starts a pod again that nothing will that is above it: that was over already when the runner died."""
        retries = (each for each in self.nodes.values() if each["type"] == "Retry")
        top = next((each for each in retries if node["id"] in each.get("children", [])), node)
        options = Options(top.get("boundaryID", ""), self.on_exit(top), flag=dict(top.get("nodeFlag", {})))
        if (holder := self.holder(top))["template"] in self.templates:
            with contextlib.suppress(NodeError, Parallel, Crashed):
                self.execute(top["name"], holder, top.get("inputs", {}), options)
        if node["id"] in self.lost:
            self.mark(node["name"], "Failed", "its runner died")

    def holder(self, node: Node) -> dict[str, Any]:
        """What calls a node's template, as far as the node says it: of an inline one nothing is known."""
        scope, name = node.get("templateScope", ""), node.get("templateName", "")
        plain = name if scope.startswith("local/") else f"{scope}/{name}"
        return {
            "name": node["displayName"],
            "template": called(node["templateRef"]) if "templateRef" in node else plain,
        }

    def _tell_time(self) -> None:
        duration = self.now - moment(self.status["startedAt"])
        self.globals |= {"workflow.status": self.status["phase"], "workflow.duration": f"{duration:.6f}"}

    def _goes_on(self, besides: AbstractSet[str] = frozenset()) -> bool:
        waits = ("Suspend", "HTTP")
        return (
            bool(self.active - self.daemons.keys() - besides)  # a daemon ends with its template
            or self.wake is not None
            or any(node["type"] in waits and node["phase"] not in FULFILLED for node in self.nodes.values())
        )

    @property
    def shared(self) -> Shared:
        assert self._shared, "locks and caches need a place"
        return self._shared

    @property
    def done(self) -> bool:
        return self.status["phase"] in COMPLETED

    @property
    def deadline(self) -> float | None:
        seconds = self.spec.get("activeDeadlineSeconds")
        return moment(self.status["startedAt"]) + int(seconds) if seconds is not None else None

    def wake_at(self, when: float) -> None:
        self.wake = when if self.wake is None else min(self.wake, when)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Resumed):
            suspend.resume(self, event)
            return
        node = self.nodes[event.id]
        if node["phase"] in FULFILLED:
            return
        if isinstance(event, Began):
            if self.memory.get(node["name"], {}).get("daemon"):
                node |= {"daemoned": True, "podIP": event.ip}
                self.daemons[node["id"]] = None
                self.again = True
            if node["type"] == "Pod":
                node["hostNodeName"] = event.host
            self.mark(node["name"], "Running", "")
            return
        for id in node.get("children", []) if node["type"] == "Pod" else ():
            self._end_containers(id)
        if event.outputs is not None:
            node["outputs"] = event.outputs
            self.export(event.outputs)
        if node["phase"] in FULFILLED:
            return  # it was ended from here
        phase, message = event.phase, event.message
        self.daemons.pop(node["id"], None)
        if node.pop("daemoned", None) and phase == "Succeeded":
            phase = "Failed"  # a daemon is to run until its steps are over
        if phase == "Succeeded" and node.get("memoizationStatus"):
            try:
                admission.remember(self, node)
            except NodeError as error:
                phase, message = "Error", str(error)
        self.mark(node["name"], phase, message)
        self.memory.pop(node["name"], None)

    def _end_containers(self, id: str) -> None:
        """Those of a pod that is over: they did not begin, or nobody knows how they ended."""
        node = self.nodes.get(id)
        if node and node["type"] == "Container":
            if node["phase"] not in FULFILLED:
                self.mark(node["name"], "Failed", "Pod Failed whilst container running")
            for child in node.get("children", []):
                self._end_containers(child)

    def _control(self) -> None:
        """Ends what a shutdown or the workflow's deadline forbids."""
        late = bool(self.deadline and self.now >= self.deadline)
        if not (late or self.shutdown):
            return
        for id, node in list(self.nodes.items()):
            if node["phase"] in FULFILLED or node["type"] not in ("Pod", "Suspend", "HTTP"):
                continue
            exiting = self.on_exit(node)
            if self.shutdown and not self.may_run(exiting):
                how = "Stopped with strategy '{}'" if node["type"] != "Pod" else "workflow shutdown with strategy:  {}"
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
            self._look()
        except Crashed as error:
            self.finish("Error", str(error))

    def _look(self) -> None:
        try:
            node = self.execute(self.name, {"template": self.spec["entrypoint"]}, self.arguments(), Options())
        except Parallel:
            return
        except NodeError as error:
            self.finish("Error", f"error in entry template execution: {error}")
            return
        if node is None:
            return
        phase: str = WORKFLOW_PHASE.get(node["phase"]) or node["phase"]
        self.globals["workflow.status"] = phase
        if self.spec.get("hooks") or node["phase"] in FULFILLED:
            self.globals["workflow.failures"] = hooks.failures(self)
        if not hooks.of_workflow(self) or node["phase"] not in FULFILLED:
            return
        phase = WORKFLOW_PHASE.get(node["phase"]) or node["phase"]
        exit_node = None
        if hook := hooks.of_exit(self, self.spec):
            name = f"{self.name}.onExit"
            if self.get(name) or self.may_run(True):
                try:
                    options = Options(on_exit=True, flag={"hooked": True})
                    exit_node = self.execute(name, hook, hook.get("arguments") or {}, options)
                except Parallel:
                    return
                except NodeError as error:
                    self.finish("Error", f"error in exit template execution : {error}")
                    return
                if not exit_node or exit_node["phase"] not in FULFILLED:
                    return
        message = node.get("message", "")
        if phase in FAILED and self.shutdown:
            message = f"Stopped with strategy '{self.shutdown}'"
        if phase == "Succeeded" and exit_node and exit_node["phase"] in FAILED:
            phase, message = exit_node["phase"], exit_node.get("message", "")
        self.finish(phase, message if phase in FAILED else "")

    def finish(self, phase: str, message: str, stuck: bool = False) -> None:
        running = {
            id for id in {*self.active, *self.daemons} if self.nodes[id]["phase"] == "Running" or id in self.anew
        }
        if running and not stuck:  # Argo waits for what they give, and looks again
            if self.again or running - self.daemons.keys():
                return
            # only the end of its template would have ended it
            phase, message, stuck = "Error", f"{message} (a daemon still runs: Argo would wait for it for ever)", True
        entry = self.get(self.name)
        if phase == "Error" and entry and entry["phase"] == "Running" and not stuck:  # as after the exit hook of a step
            self.mark(self.name, "Error", "Workflow operation error")
        self.status |= {"phase": phase, "message": message, "finishedAt": stamp(self.now)}
        if not volumes.kept(self.spec, phase):
            self.status.pop("persistentVolumeClaims", None)

    def execute(
        self, name: str, holder: dict[str, Any], arguments: dict[str, Any], options: Options, retried: bool = False
    ) -> Node | None:
        """Brings node `name` as far as it can go now. Raises Parallel, NodeError (the node is marked then)."""
        self.depth += not retried
        try:
            if self.depth >= DEPTH:
                return self.error(name, holder, options, TOO_DEEP)
            return self._execute(name, holder, arguments, options, retried)
        finally:
            self.depth -= not retried

    def _execute(
        self, name: str, holder: dict[str, Any], arguments: dict[str, Any], options: Options, retried: bool
    ) -> Node | None:
        node = self.get(name)
        if node and node["phase"] in FULFILLED:
            self.leaked.discard(node["id"])
            return node
        if name in self.entered and not node and not retried and admission.full(self):
            raise Parallel
        try:
            template = self.memory.get(name) or self._enter(name, holder, arguments, options)
        except NodeError as error:
            self.error(name, holder, options, str(error))
            raise
        self.entered.add(name)
        if (
            not retried
            and node
            and template.get("timeout")
            and node["phase"] == "Pending"
            and node["id"] not in self.started
        ):
            self._check_timeout(node, template)
        if not retried:
            admission.limit(self, template, node, options.boundary)
        self.memory[name] = template
        if not retried and ("synchronization" in template or "memoize" in template):
            try:
                node = admission.before(self, name, holder, template, options)
            except NodeError as error:
                self.error(name, holder, options, str(error))
                raise
            if node and (node["phase"] in FULFILLED or "synchronizationStatus" in node):
                return node
        strategy = self.strategy(template)
        if strategy is not None and not retried:
            return attempts.execute(self, name, holder, template, strategy, options)
        try:
            return self._run(name, holder, template, options)
        except NodeError as error:
            self.error(name, holder, options, str(error))
            raise

    def strategy(self, template: dict[str, Any]) -> dict[str, Any] | None:
        """How a template is retried; an empty strategy retries for ever."""
        return template.get("retryStrategy", self.spec.get("retryStrategy"))

    def _enter(self, name: str, holder: dict[str, Any], arguments: dict[str, Any], options: Options) -> dict[str, Any]:
        template = retries.with_defaults(self.template(holder), self.spec.get("templateDefaults"))
        if mounted := volumes.declared(self.spec, self.status, template):
            template = {**template, "volumes": mounted}
        if self.spec.get("archiveLogs"):
            template = {**template, "archiveLocation": {"archiveLogs": True, **(template.get("archiveLocation") or {})}}
        local = {"node.name": name, f"{options.kind}.name": holder.get("name", "")}
        if any(kind in template for kind in leaf_templates.KINDS) and self.strategy(template) is None:
            local["pod.name"] = self.pod_name(name, template["name"])
        return self.processed(template, arguments, local)

    def _check_timeout(self, node: Node, template: dict[str, Any]) -> None:
        if self.now >= admission.times_out(node, template):
            self.mark(node["name"], "Failed", "timeout")
            raise TimedOut("timeout")

    def _run(self, name: str, holder: dict[str, Any], template: dict[str, Any], options: Options) -> Node | None:
        for kind, module in (("dag", dag), ("steps", steps)):
            if kind in template:
                try:
                    return module.execute(self, name, holder, template, options)
                finally:  # also where it ends by an error
                    if (node := self.get(name)) and node["phase"] in FULFILLED:
                        self._end_daemons(node["id"])
        if "suspend" in template:
            return suspend.execute(self, name, holder, template, options)
        if not any(kind in template for kind in leaf_templates.KINDS):
            raise NodeError(f"Template '{template['name']}' missing specification")
        return leaf_templates.execute(self, name, holder, template, options)

    def _end_daemons(self, boundary: str) -> None:
        for node in [self.nodes[id] for id in self.daemons]:
            if node.get("boundaryID") == boundary:
                self.daemons.pop(node["id"], None)
                node.pop("daemoned", None)
                self.mark(node["name"], "Succeeded")
                self.actions += [Kill(node["id"])] if node["type"] == "Pod" else []
