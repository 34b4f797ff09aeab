"""Make random small workflows with all features of the local runner, as a hypothesis strategy or as
a series that a seed determines.

@given(workflows())
def test_it(objects): ...            # the Workflow and its other objects, all named after NAME
for objects in random_workflows(300, seed=1): ...

The outcome of a random workflow depends only on its text, never on timing. A few random workflows
contain mistakes that users make.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tests.conformance.chance import Chance
from tests.conformance.leaves import (
    COMMON,
    LIMITS,
    PORT,
    RARE_KINDS,
    UNREACHABLE_URL,
    Template,
    make_leaf,
)

NAME = "random-wf"
ITEMS: tuple[list[Any], ...] = (
    ["i1", "i2"],
    [1, 2],
    [{"k": "a", "n": 1}, {"k": "b", "n": 2}],
    [[1], ["x"]],
    [True],
    [],
)
PARAMS = ('["a", "b"]', '[{"k": "a", "n": 1.5}]', "[]", "nope", "{{workflow.parameters.list}}")
SEQUENCES = (
    {"count": "2"},
    {"count": 1, "start": "5"},
    {"start": "3", "end": "1", "format": "n%02d"},
    {"end": "{{workflow.parameters.num}}", "start": "1"},
    {"count": 0},
    {"count": "{{=asInt(workflow.parameters.num) + 1}}"},
)
OF_ITEM = ("{{item}}", "{{item.k}}", "{{=item}}", "{{=item.k}}", "x-{{item}}")
VALUES = (
    "x",
    "hello world",
    "",
    "7",
    "0.00001",
    "{{workflow.parameters.wp}}",
    "{{workflow.parameters.num}}-{{workflow.name}}",
    "{{inputs.parameters.a}}",
    "{{=asInt(workflow.parameters.num) + 1}}",
    "{{=asFloat(workflow.parameters.num) / 2}}",
    "{{=workflow.parameters['nope'] ?? 'none'}}",
    "{{=workflow.parameters.wp == 'prod' ? 'yes' : 'no'}}",
    "{{=toJson(filter([1, 2, 3, 4], {# > 2}))}}",
    "{{=map(1..3, {# * 2})}}",
    "{{=jsonpath(workflow.parameters.js, '$.a.b')}}",
    "{{=jsonpath(workflow.parameters.js, '$.a.b[1]')}}",
    "{{=sprig.upper(inputs.parameters.a) + '!'}}",
    "{{=sprig.trimPrefix('dev-', workflow.parameters.wp)}}",
    "{{=sprig.b64enc(inputs.parameters.a)}}",
    "{{=len(inputs.parameters.a)}}",
    "{{=inputs.parameters.a + 1}}",
    "{{=nil ?? 'd'}}",
)
WHENS = (
    "true",
    "false",
    "1 == 2",
    "'a' != 'b' && 3 > 2",
    "'10' > '9'",
    "10 > 9",
    "True == true",
    "foo",
    "5e-05 < 0.1",
    "0.00005 < 0.1",
    "7 in (1, 7)",
    "!(1 == 1)",
    "{{workflow.parameters.wp}} == dev-1",
    "'{{workflow.parameters.wp}}' == 'dev-1'",
    "{{workflow.parameters.wp}} =~ '^dev'",
    "'{{workflow.parameters.wp}}' =~ '^dev'",
    "{{workflow.parameters.num}} > 3",
    "{{workflow.parameters.num}} + 1 == 2 || {{workflow.parameters.num}} * 2 == 10",
    "{{inputs.parameters.a}} == x",
    "'{{inputs.parameters.a}}' == ''",
    "{{=asFloat(workflow.parameters.num) < 3}}",
    "{{=workflow.parameters.wp != 'prod'}}",
    "{{=inputs.parameters.a}}",
    "{{inputs.parameters.a}} == {{inputs.parameters.a}}",
    "NaN > 0.5",
    "v1.2 == v1.2",
    "a/b == a/b",
)


@dataclass(frozen=True)
class Called:
    """A step or task that later steps or tasks can refer to. `outputs`: the step's available
    outputs; `key_prefix`: prefix of its artifact's key; `ancestors`: names of the steps or tasks
    before it."""

    name: str
    prefix: str
    outputs: set[str]
    loops: bool
    key_prefix: str = ""
    nested: bool = False
    ancestors: frozenset[str] = frozenset()

    def tag(self, path: str, expression: bool = False) -> str:
        if not expression:
            return f"{{{{{self.prefix}.{self.name}.{path}}}}}"
        if "-" in self.name:
            return f"{self.prefix}['{self.name}'].{path}"
        return f"{self.prefix}.{self.name}.{path}"


@dataclass
class Builder:
    """Builds one random workflow. `remaining`: number of templates that may still be called."""

    chance: Chance
    artifacts: bool = True
    slow: bool = True
    remaining: int = 6
    templates: list[Template] = field(default_factory=list)
    elsewhere: list[Template] = field(default_factory=list)
    numbers: int = 0
    # True if no limits may be set, because a hook that finds a limit reached is an error
    unlimited: bool = False
    # True if the workflow has a daemon; if a daemon is killed before the end of the workflow, its
    # phase is random
    daemons: bool = False

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def leaf(self, kinds: tuple[str, ...]) -> tuple[str, Template, set[str]]:
        template, gives = make_leaf(self.chance, kind := self.chance.one(*kinds))
        template = {"name": f"{kind}{self.number()}", **template}
        # give each template its own key, because the result would depend on which of two templates
        # with the same key starts first
        if "memoize" in template:
            template["memoize"]["key"] += f"-{template['name']}"
        if kind == "file" and self.chance(40):
            key = f"{{{{workflow.name}}}}/{template['name']}/{{{{pod.name}}}}/f"
            template["outputs"]["artifacts"][0]["s3"] = {"key": key}
        return kind, template, gives

    def composite(self, depth: int) -> tuple[Template, set[str]]:
        steps = self.chance(50)
        template: Template = {
            "name": f"c{self.number()}",
            "inputs": {"parameters": [{"name": "a", "default": "cdef"}]},
        }
        called: list[Called] = []

        if steps:
            template["steps"] = groups = []
            for _ in range(self.chance.between(1, 3)):
                groups.append(parallel_steps := [])
                ancestors = list(called)
                for _ in range(self.chance.one(1, 1, 2)):
                    self._add_call(parallel_steps, called, ancestors, "steps", depth)
        else:
            template["dag"] = {"tasks": (tasks := [])}
            style = self.chance.one("depends", "dependencies")
            for _ in range(self.chance.between(1, 4)):
                self._add_task(tasks, called, style, depth)

            template["dag"].update(
                self.chance.one({}, {}, {}, {"failFast": False}, {"target": called[-1].name})
            )

        outputs = self._add_outputs(template, called)
        if self.chance(6) and not (self.daemons and depth == 0):
            template["retryStrategy"] = {"limit": "1"}

        if self.chance(5):
            template["synchronization"] = {
                "mutexes": [{"name": f"{{{{workflow.name}}}}-{template['name']}"}]
            }

        if self.chance(8) and not self.unlimited:
            # a template that fails fast does not wait for pods of nested templates
            flat = steps and not any(callee.nested for callee in called)
            template.update(
                {"parallelism": 1, **self.chance.one({}, {"failFast": True} if flat else {})}
            )

        return template, outputs

    def _add_task(self, tasks: list[Any], called: list[Called], style: str, depth: int) -> None:
        ancestors = [callee for callee in called if self.chance(60)]
        ancestor_names = {callee.name for callee in ancestors} | {
            name for callee in ancestors for name in callee.ancestors
        }

        task = self._add_call(
            tasks,
            called,
            [callee for callee in called if callee.name in ancestor_names],
            "tasks",
            depth,
        )

        called[-1] = replace(called[-1], ancestors=frozenset(ancestor_names))

        if ancestors and style == "dependencies":
            task["dependencies"] = [callee.name for callee in ancestors]
        elif ancestors:
            task["depends"] = self.chance.one(" && ", " && ", " || ").join(
                map(self._depends_on, ancestors)
            )

        # remove the field, because Argo rejects it here
        if style == "depends" and not self.chance(1):
            task.pop("continueOn", None)

    def _depends_on(self, called: Called) -> str:
        results = ["Succeeded", "Failed", "Skipped", "Omitted", "Errored", "Daemoned"]
        results += ["AnySucceeded", "AllFailed"] if called.loops else []
        condition = f"{called.name}.{self.chance.one(*results)}"
        return self.chance.one(
            called.name,
            called.name,
            condition,
            f"({called.name}.Succeeded || {condition})",
            f"!{called.name}.Failed",
        )

    def _add_call(
        self,
        into: list[Any],
        called: list[Called],
        ancestors: list[Called],
        prefix: str,
        depth: int,
    ) -> dict[str, Any]:
        """Add a step or task with a new template."""
        self.remaining -= 1
        name = f"t{self.chance.one('', '', '', '-')}{self.number()}"
        holders = [callee for callee in ancestors if "f" in callee.outputs]
        kinds = (*COMMON, *COMMON, *RARE_KINDS, *(("file", "file") if self.artifacts else ()))
        kinds += ("late",) if self.slow else ()
        kinds += ("asks",) if self.chance(30) else ()
        kinds += ("daemon", "daemon") if depth == 0 and not self.daemons else ()
        key_prefixes = [callee.key_prefix for callee in ancestors if callee.key_prefix]
        serving = [callee for callee in ancestors if "serves" in callee.outputs]

        if key_prefixes and self.chance(60):
            kinds = ("listing",)
        elif holders and self.chance(70):
            kinds = ("reader",)
        elif serving and self.chance(70):
            kinds = ("asks",)

        kind = ""
        if depth < 2 and self.remaining > 1 and self.chance(25):
            template, outputs = self.composite(depth + 1)
        else:
            kind, template, outputs = self.leaf(kinds)

        if kind == "flaky" and self.chance(10):
            outputs = set()

        key_prefix = ""
        if kind == "file" and "s3" in template["outputs"]["artifacts"][0]:
            key_prefix = f"{{{{workflow.name}}}}/{template['name']}"
        elif kind == "listing":
            template["data"]["source"]["artifactPaths"]["s3"]["key"] = self.chance.one(
                *key_prefixes
            )
        elif kind == "suspend" and prefix == "steps":
            # give each output a default, because an error ends the group of steps although other
            # steps still run
            for output in (template.get("outputs") or {}).get("parameters") or []:
                output["valueFrom"].setdefault("default", "d")
        elif kind == "daemon":
            # a daemon counts for a parallelism limit
            self.daemons = self.unlimited = True

        holder: dict[str, Any] = {"name": name, **self._put_template(template)}
        loops = "serves" not in outputs and self._add_loop(holder, ancestors)
        self._add_arguments(holder, ancestors, prefix, loops)

        if kind == "asks":
            urls = [
                f"http://{callee.tag('ip')}:{PORT}/{self.chance.one('one', 'one', 'nope')}"
                for callee in serving
            ]
            url = self.chance.one(*urls) if urls else UNREACHABLE_URL
            holder["arguments"] = {"parameters": [{"name": "a", "value": url}]}

            # do not read the body of a 404 response, which depends on the server
            if url.endswith("nope"):
                template["http"]["method"] = "HEAD"

        if kind == "reader":
            artifact = {"name": "f", "from": self.chance.one(*holders).tag("outputs.artifacts.f")}
            holder.setdefault("arguments", {})["artifacts"] = [artifact]

        if self.chance(25):
            holder["when"] = self._make_condition(ancestors, loops)

        if self.chance(30):
            holder["continueOn"] = self.chance.one(
                {"failed": True}, {"error": True}, {"failed": True, "error": True}
            )

        if prefix == "steps" and self.chance(10):
            holder["hooks"] = self._make_hooks(
                Called(name, prefix, outputs, loops), conditional=not loops
            )
        elif kind and not loops and not holder.keys() & {"when", "arguments"} and self.chance(30):
            # a DAG may end before it reads the hooks of skipped tasks, or of a loop
            holder["hooks"] = self._make_hooks(Called(name, prefix, outputs, loops))

        into.append(holder)
        called.append(
            Called(name, prefix, outputs - {"f"} if loops else outputs, loops, key_prefix, not kind)
        )
        return holder

    def _put_template(self, template: Template) -> dict[str, Any]:
        """Put a template into the workflow's templates, into the step itself, or into a
        WorkflowTemplate. Return the reference to the template."""
        location = self.chance.one("here", "here", "here", "here", "inline", "elsewhere")
        if (
            location == "inline"
            and "daemon" not in template
            and "pod.name" not in repr(template)
            and "steps" not in template
            and "dag" not in template
        ):
            return {"inline": {key: value for key, value in template.items() if key != "name"}}

        if location == "elsewhere" and "steps" not in template and "dag" not in template:
            self.elsewhere.append(template)
            return {"templateRef": {"name": f"{NAME}-lib", "template": template["name"]}}

        self.templates.append(template)
        return {"template": template["name"]}

    def _add_loop(self, holder: dict[str, Any], ancestors: list[Called]) -> bool:
        if not self.chance(20):
            return False

        lists = [
            callee.tag("outputs.result")
            for callee in ancestors
            if "list" in callee.outputs and not callee.loops
        ]

        kind = self.chance.one("withItems", "withParam", "withSequence")

        values = {
            "withItems": ITEMS,
            "withParam": (*lists, *lists, *PARAMS),
            "withSequence": SEQUENCES,
        }

        holder[kind] = self.chance.one(*values[kind])

        return True

    def _add_arguments(
        self, holder: dict[str, Any], ancestors: list[Called], prefix: str, loops: bool
    ) -> None:
        values: list[Any] = [*VALUES, f"{{{{{prefix}.name}}}}"]
        if loops and self.chance(70):
            values = list(OF_ITEM)
        elif ancestors and self.chance(60):
            values = [tag for callee in ancestors for tag in self._make_tags(callee)]
        if self.chance(80):
            holder["arguments"] = {"parameters": [{"name": "a", "value": self.chance.one(*values)}]}

    def _make_tags(self, called: Called) -> list[str]:
        paths = ["status"]
        paths += ["outputs.result", "exitCode"] if "result" in called.outputs else []
        paths += ["outputs.parameters.p"] * 2 if "p" in called.outputs else []
        plain = [called.tag(path) for path in paths]
        computed = [f"{{{{={called.tag(path, True)}}}}}" for path in paths]
        return [
            *plain,
            *computed,
            f"{{{{={called.tag(paths[-1], True)} ?? 'none'}}}}",
            f"<{plain[-1]}>",
        ]

    def _make_condition(self, ancestors: list[Called], loops: bool) -> str:
        conditions = list(WHENS)
        if loops and self.chance(60):
            conditions = [
                "{{item}} != 2",
                "'{{item}}' == 'i1'",
                "{{item.n}} > 1",
                "{{=item == 'i1'}}",
            ]
        elif ancestors and self.chance(60):
            ancestor = self.chance.one(*ancestors)
            conditions = [
                f"{ancestor.tag('status')} == Succeeded",
                f"{{{{={ancestor.tag('status', True)} != 'Failed'}}}}",
            ]
            if "result" in ancestor.outputs:
                conditions += [
                    f"{ancestor.tag('outputs.result')} == 3",
                    f"'{ancestor.tag('outputs.result')}' != ''",
                ]
                conditions += [f"{ancestor.tag('exitCode')} == 0"]

        return self.chance.one(*conditions)

    def _make_hooks(self, called: Called, conditional: bool = True) -> dict[str, Any]:
        _, template, _ = self.leaf(("echo", "fails", "parameter"))
        # remove the lock, because it would be random whether the lock fails before a parallel step
        template.pop("synchronization", None)
        self.templates.append(template)
        hook: dict[str, Any] = {"template": template["name"]}

        if self.chance(50):
            hook["arguments"] = {
                "parameters": [{"name": "a", "value": self.chance.one(*self._make_tags(called))}]
            }

        if conditional and self.chance(30):
            self.unlimited = True
            phase = self.chance.one("Succeeded", "Failed")
            return {"some": hook | {"expression": f"{called.tag('status', True)} == '{phase}'"}}

        return {"exit": hook}

    def _add_outputs(self, template: Template, called: list[Called]) -> set[str]:
        outputs = set()
        sources = [callee for callee in called if "p" in callee.outputs]
        if sources and self.chance(60):
            chosen_source = self.chance.one(*sources)
            source = self.chance.one(
                {"parameter": chosen_source.tag("outputs.parameters.p")},
                {"parameter": chosen_source.tag("outputs.parameters.p"), "default": "d"},
                {"expression": chosen_source.tag("outputs.parameters.p", True)},
                {"expression": f"{chosen_source.tag('outputs.parameters.p', True)} ?? 'none'"},
            )
            template.setdefault("outputs", {})["parameters"] = [{"name": "p", "valueFrom": source}]
            outputs.add("p")

        sources = [callee for callee in called if "f" in callee.outputs]
        if sources and self.chance(60):
            artifact = {"name": "f", "from": self.chance.one(*sources).tag("outputs.artifacts.f")}
            artifact.update(self.chance.one({}, {"optional": True}))
            template.setdefault("outputs", {})["artifacts"] = [artifact]
            outputs.add("f")

        return outputs

    def workflow(self) -> list[dict[str, Any]]:
        top, _ = self.composite(0)
        self.templates.append(top)

        parameters = {
            "wp": self.chance.one("prod", "dev-1", "a b"),
            "num": self.chance.one("1", "5", "0.5"),
            "js": '{"a": {"b": [1, 2]}}',
            "list": self.chance.one('["p", "q"]', "[]", "[1, {}]"),
        }

        arguments = [{"name": name, "value": value} for name, value in parameters.items()]
        spec: dict[str, Any] = {"entrypoint": top["name"], "arguments": {"parameters": arguments}}
        limit = {} if self.unlimited else {"parallelism": 1}
        spec.update(self.chance.one({}, {}, {}, limit, {"activeDeadlineSeconds": 900}))

        if self.chance(4):
            spec["synchronization"] = {"mutexes": [{"name": f"{NAME}-whole"}]}

        if self.chance(15) and not self.daemons:
            _, template, _ = self.leaf(("echo", "fails", "script"))
            self.templates.append(template)
            tag = self.chance.one(
                "{{workflow.status}}", "{{=workflow.status == 'Failed'}}", "{{workflow.name}}"
            )
            hook = {
                "template": template["name"],
                "arguments": {"parameters": [{"name": "a", "value": tag}]},
            }
            spec.update(self.chance.one({"onExit": template["name"]}, {"hooks": {"exit": hook}}))

        if self.chance(5) and not self.daemons:
            spec["templateDefaults"] = {"retryStrategy": {"limit": "1"}}

        spec["templates"] = self.templates
        if self.chance(6):
            self._add_mistake(spec, top)

        return self._make_objects(spec)

    def _make_objects(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        version = {"apiVersion": "argoproj.io/v1alpha1"}
        other_objects = []
        if LIMITS in repr((self.templates, self.elsewhere)):
            limits = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{NAME}-limits"},
            }
            other_objects.append(
                limits | {"data": {"one": "1", "two": "2", "text": "few", "none": "0"}}
            )

        if self.elsewhere:
            library = {"kind": "WorkflowTemplate", "metadata": {"name": f"{NAME}-lib"}}
            other_objects.append(version | library | {"spec": {"templates": self.elsewhere}})

        unique = len({template["name"] for template in self.templates}) == len(self.templates)
        if unique and self.chance(5):  # Argo does not check templates in a workflowTemplateRef
            workflow_template = {"kind": "WorkflowTemplate", "metadata": {"name": f"{NAME}-whole"}}
            other_objects.append(version | workflow_template | {"spec": spec})
            spec = {"workflowTemplateRef": {"name": f"{NAME}-whole"}}

        return [
            version | {"kind": "Workflow", "metadata": {"name": NAME}, "spec": spec},
            *other_objects,
        ]

    def _add_mistake(self, spec: dict[str, Any], top: Template) -> None:
        """Add a mistake to a workflow that Argo's validation rejects."""
        if "steps" in top:
            holders = [caller for parallel_steps in top["steps"] for caller in parallel_steps]
        else:
            holders = top["dag"]["tasks"]

        holder = self.chance.one(*holders)
        mistake = self.chance.between(0, 5)
        if mistake == 0:
            holder["template"] = "nowhere"
            holder.pop("inline", None)
            holder.pop("templateRef", None)
        elif mistake == 1:
            spec["entrypoint"] = "nowhere"
        elif mistake == 2:
            holder["arguments"] = {
                "parameters": [{"name": "a", "value": "{{inputs.parameters.nope}}"}]
            }
        elif mistake == 3:
            holders.append(holder) if "dag" in top else top["steps"].append([holder])
        elif mistake == 4:
            spec["templates"].append(spec["templates"][0])
        else:
            holder["arguments"] = {"parameters": [{"name": "a"}]}


@st.composite
def workflows(draw: st.DrawFn, artifacts: bool = True, slow: bool = False) -> list[dict[str, Any]]:
    """Draw the objects of a workflow; `artifacts`: use an object store; `slow`: use deadlines of
    some seconds."""
    return Builder(
        Chance(lambda count: draw(st.integers(0, count - 1))), artifacts, slow
    ).workflow()


def random_workflows(
    count: int, seed: int, artifacts: bool = True
) -> Iterator[list[dict[str, Any]]]:
    """Yield `count` random workflows; each workflow is determined by the seed and its index."""
    for index in range(count):
        yield Builder(Chance(random.Random(f"{seed}/{index}").randrange), artifacts).workflow()
