"""What a pod, or a request by http, is for: the templates that nothing is below.

    node = execute(scheduler, name, holder, template, options)     # and a Start among the scheduler's actions

Source: Argo's operator.go (executeContainer, executeScript), workflowpod.go.
"""

import json
import re
from typing import TYPE_CHECKING, Any

from rekindle.argo.language.substitute import TemplateError, substitute
from rekindle.argo.manifest import pod_patch
from rekindle.argo.manifest.patch import PatchError
from rekindle.errors import ConfigError
from rekindle.local.engine import admission, retry
from rekindle.local.engine.inputs import Filled
from rekindle.local.engine.nodes import Node, NodeError, Options, Start, keep_inputs
from rekindle.local.pods.kinds import container_set

if TYPE_CHECKING:
    from rekindle.local.engine.scheduler import Scheduler
KINDS = ("container", "script", "resource", "containerSet", "data", "http")
RESULTS = r"""KIND(?:\.([-\w]+)\.|\[\\?['"]([-\w]+)\\?['"]\]\.)outputs\.result"""


def execute(s: "Scheduler", name: str, holder: dict[str, Any], template: dict[str, Any], options: Options) -> Node:
    """Has the pod of a node started, once. Raises NodeError."""
    node = s.get(name)
    if not node:
        node = s.create(name, "HTTP" if "http" in template else "Pod", "Pending", holder, options)
        keep_inputs(node, template)
        if memo := template.get("memoize"):
            node["memoizationStatus"] = admission.memoized(memo, hit=False)
    if node["id"] in s.started:
        return node
    exiting = options.on_exit or s.on_exit(node)
    if not s.may_run(exiting):
        return s.mark(name, "Failed", f"workflow shutdown with strategy: {s.shutdown}")
    if s.deadline and s.now >= s.deadline and not exiting:
        return s.mark(name, "Failed", "Step exceeded its deadline")
    pod = s.pod_name(name, template["name"])
    scope = {f"inputs.parameters.{each['name']}": each["value"] for each in template["inputs"]["parameters"]}
    try:
        known = {**s.globals, **scope, "pod.name": pod}
        final = template if isinstance(template, Filled) else substitute(template, known)
        patches = substitute(s.spec.get("podSpecPatch"), known), final.get("podSpecPatch")
        final = pod_patch.patched(final, patches)
    except TemplateError as error:
        raise NodeError(str(error)) from None
    except (PatchError, ConfigError) as error:
        raise NodeError(f"Error applying PodSpecPatch: {error}") from None
    limits = [options.deadline] if options.deadline else []
    try:
        if (seconds := final.get("activeDeadlineSeconds")) is not None:
            limits.append(s.now + retry.whole(seconds))
        if template.get("timeout"):
            limits.append(admission.times_out(node, template))
    except ValueError as error:
        raise NodeError(str(error)) from None
    s.started.add(node["id"])
    if node["type"] == "Pod":
        s.active.add(node["id"])
    s.lost.discard(node["id"])
    inside = container_set.nodes(s, node, template, holder, options) if "containerSet" in template else {}
    deadline, captured = min(limits, default=None), _captured(s, name, options.boundary)
    s.actions.append(Start(node["id"], pod, final, captured, deadline, inside))
    return node


def _captured(s: "Scheduler", name: str, boundary: str) -> bool:
    """Whether the parent's template mentions this step's outputs.result."""
    if not boundary:
        return False
    above = s.nodes[boundary]
    parent = s.memory.get(above["name"]) or s.templates.get(s.holder(above)["template"], {})
    kind = "tasks" if "dag" in parent else "steps"
    mentioned: set[str] | None = s.memory.get(("results", boundary))
    if mentioned is None:
        found = re.findall(RESULTS.replace("KIND", kind), json.dumps(parent))
        mentioned = s.memory["results", boundary] = {plain or quoted for plain, quoted in found}
    return re.sub(r"(\([^()]*\)|\[[^\[\]]*\])+$", "", name).rpartition(".")[2] in mentioned
