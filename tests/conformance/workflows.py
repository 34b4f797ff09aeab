"""Random small workflows over all that the local runner does: a hypothesis strategy, and a seeded series.

@given(workflows())
def test_it(objects): ...            # the Workflow and what lies beside it, all named after NAME
for objects in some(300, seed=1): ...

What such a workflow comes to is decided by its text: nothing in it races. A few are slightly wrong, as users write.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tests.conformance.chance import Chance
from tests.conformance.leaves import COMMON, LIMITS, NOBODY, PORT, RARE, Template, leaf

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
    """A step or task: what it can be asked for, and those before it. `place`: below which its artifact is kept."""

    name: str
    prefix: str
    gives: set[str]
    loops: bool
    place: str = ""
    nested: bool = False
    before: frozenset[str] = frozenset()

    def tag(self, path: str, expression: bool = False) -> str:
        if not expression:
            return f"{{{{{self.prefix}.{self.name}.{path}}}}}"
        return f"{self.prefix}['{self.name}'].{path}" if "-" in self.name else f"{self.prefix}.{self.name}.{path}"


@dataclass
class Maker:
    """One workflow on its way. `left`: so many templates are still to be called."""

    chance: Chance
    artifacts: bool = True
    slow: bool = True
    left: int = 6
    templates: list[Template] = field(default_factory=list)
    elsewhere: list[Template] = field(default_factory=list)
    numbers: int = 0
    unlimited: bool = False  # a hook that finds a limit reached is an error
    daemons: bool = False  # how one ends that is killed before the whole is over is a matter of milliseconds

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def leaf(self, kinds: tuple[str, ...]) -> tuple[str, Template, set[str]]:
        template, gives = leaf(self.chance, kind := self.chance.one(*kinds))
        template = {"name": f"{kind}{self.number()}", **template}
        if "memoize" in template:  # of a key of two templates it is a race who finds what the other gave
            template["memoize"]["key"] += f"-{template['name']}"
        if kind == "file" and self.chance(40):
            key = f"{{{{workflow.name}}}}/{template['name']}/{{{{pod.name}}}}/f"
            template["outputs"]["artifacts"][0]["s3"] = {"key": key}
        return kind, template, gives

    def composite(self, depth: int) -> tuple[Template, set[str]]:
        steps = self.chance(50)
        template: Template = {"name": f"c{self.number()}", "inputs": {"parameters": [{"name": "a", "default": "cdef"}]}}
        called: list[Called] = []
        if steps:
            template["steps"] = groups = []
            for _ in range(self.chance.between(1, 3)):
                groups.append(group := [])
                before = list(called)
                for _ in range(self.chance.one(1, 1, 2)):
                    self._call(group, called, before, "steps", depth)
        else:
            template["dag"] = {"tasks": (tasks := [])}
            how = self.chance.one("depends", "dependencies")
            for _ in range(self.chance.between(1, 4)):
                self._task(tasks, called, how, depth)
            template["dag"] |= self.chance.one({}, {}, {}, {"failFast": False}, {"target": called[-1].name})
        gives = self._outputs(template, called)
        if self.chance(6) and not (self.daemons and depth == 0):
            template["retryStrategy"] = {"limit": "1"}
        if self.chance(5):
            template["synchronization"] = {"mutexes": [{"name": f"{{{{workflow.name}}}}-{template['name']}"}]}
        if self.chance(8) and not self.unlimited:
            # what fails fast does not wait for what runs below its own steps
            flat = steps and not any(callee.nested for callee in called)
            template |= {"parallelism": 1, **self.chance.one({}, {"failFast": True} if flat else {})}
        return template, gives

    def _task(self, tasks: list[Any], called: list[Called], how: str, depth: int) -> None:
        before = [callee for callee in called if self.chance(60)]
        named = {callee.name for callee in before} | {name for callee in before for name in callee.before}
        task = self._call(tasks, called, [callee for callee in called if callee.name in named], "tasks", depth)
        called[-1] = replace(called[-1], before=frozenset(named))
        if before and how == "dependencies":
            task["dependencies"] = [callee.name for callee in before]
        elif before:
            task["depends"] = self.chance.one(" && ", " && ", " || ").join(map(self._depended, before))
        if how == "depends" and not self.chance(1):  # Argo refuses it
            task.pop("continueOn", None)

    def _depended(self, called: Called) -> str:
        results = ["Succeeded", "Failed", "Skipped", "Omitted", "Errored", "Daemoned"]
        results += ["AnySucceeded", "AllFailed"] if called.loops else []
        one = f"{called.name}.{self.chance.one(*results)}"
        return self.chance.one(
            called.name, called.name, one, f"({called.name}.Succeeded || {one})", f"!{called.name}.Failed"
        )

    def _call(
        self, into: list[Any], called: list[Called], before: list[Called], prefix: str, depth: int
    ) -> dict[str, Any]:
        """Adds a step or task of a new template."""
        self.left -= 1
        name = f"t{self.chance.one('', '', '', '-')}{self.number()}"
        holders = [callee for callee in before if "f" in callee.gives]
        kinds = (*COMMON, *COMMON, *RARE, *(("file", "file") if self.artifacts else ()))
        kinds += ("late",) if self.slow else ()
        kinds += ("asks",) if self.chance(30) else ()
        kinds += ("daemon", "daemon") if depth == 0 and not self.daemons else ()
        places = [callee.place for callee in before if callee.place]
        serving = [callee for callee in before if "serves" in callee.gives]
        if places and self.chance(60):
            kinds = ("listing",)
        elif holders and self.chance(70):
            kinds = ("reader",)
        elif serving and self.chance(70):
            kinds = ("asks",)
        kind = ""
        if depth < 2 and self.left > 1 and self.chance(25):
            template, gives = self.composite(depth + 1)
        else:
            kind, template, gives = self.leaf(kinds)
        if kind == "flaky" and self.chance(10):
            gives = set()
        place = ""
        if kind == "file" and "s3" in template["outputs"]["artifacts"][0]:
            place = f"{{{{workflow.name}}}}/{template['name']}"
        elif kind == "listing":
            template["data"]["source"]["artifactPaths"]["s3"]["key"] = self.chance.one(*places)
        elif kind == "suspend" and prefix == "steps":  # an error ends the group, whatever runs beside
            for output in (template.get("outputs") or {}).get("parameters") or []:
                output["valueFrom"].setdefault("default", "d")
        elif kind == "daemon":
            self.daemons = self.unlimited = True  # it takes a place where there is a limit
        holder: dict[str, Any] = {"name": name, **self._place(template)}
        loops = "serves" not in gives and self._loop(holder, before)
        self._arguments(holder, before, prefix, loops)
        if kind == "asks":
            urls = [f"http://{callee.tag('ip')}:{PORT}/{self.chance.one('one', 'one', 'nope')}" for callee in serving]
            url = self.chance.one(*urls) if urls else NOBODY
            holder["arguments"] = {"parameters": [{"name": "a", "value": url}]}
            if url.endswith("nope"):  # what it says then is the server's own
                template["http"]["method"] = "HEAD"
        if kind == "reader":
            artifact = {"name": "f", "from": self.chance.one(*holders).tag("outputs.artifacts.f")}
            holder.setdefault("arguments", {})["artifacts"] = [artifact]
        if self.chance(25):
            holder["when"] = self._when(before, loops)
        if self.chance(30):
            holder["continueOn"] = self.chance.one({"failed": True}, {"error": True}, {"failed": True, "error": True})
        if prefix == "steps" and self.chance(10):
            holder["hooks"] = self._hooks(Called(name, prefix, gives, loops), conditional=not loops)
        elif kind and not loops and not holder.keys() & {"when", "arguments"} and self.chance(30):
            # a DAG may be over before it looks at the hooks of what never ran, or of a loop
            holder["hooks"] = self._hooks(Called(name, prefix, gives, loops))
        into.append(holder)
        called.append(Called(name, prefix, gives - {"f"} if loops else gives, loops, place, not kind))
        return holder

    def _place(self, template: Template) -> dict[str, Any]:
        """Where a template is: with the others, in the step itself, or in a WorkflowTemplate."""
        where = self.chance.one("here", "here", "here", "here", "inline", "elsewhere")
        if (
            where == "inline"
            and "daemon" not in template
            and "pod.name" not in repr(template)
            and "steps" not in template
            and "dag" not in template
        ):
            return {"inline": {key: value for key, value in template.items() if key != "name"}}
        if where == "elsewhere" and "steps" not in template and "dag" not in template:
            self.elsewhere.append(template)
            return {"templateRef": {"name": f"{NAME}-lib", "template": template["name"]}}
        self.templates.append(template)
        return {"template": template["name"]}

    def _loop(self, holder: dict[str, Any], before: list[Called]) -> bool:
        if not self.chance(20):
            return False
        lists = [callee.tag("outputs.result") for callee in before if "list" in callee.gives and not callee.loops]
        kind = self.chance.one("withItems", "withParam", "withSequence")
        values = {"withItems": ITEMS, "withParam": (*lists, *lists, *PARAMS), "withSequence": SEQUENCES}
        holder[kind] = self.chance.one(*values[kind])
        return True

    def _arguments(self, holder: dict[str, Any], before: list[Called], prefix: str, loops: bool) -> None:
        values: list[Any] = [*VALUES, f"{{{{{prefix}.name}}}}"]
        if loops and self.chance(70):
            values = list(OF_ITEM)
        elif before and self.chance(60):
            values = [tag for callee in before for tag in self._tags(callee)]
        if self.chance(80):
            holder["arguments"] = {"parameters": [{"name": "a", "value": self.chance.one(*values)}]}

    def _tags(self, called: Called) -> list[str]:
        paths = ["status"]
        paths += ["outputs.result", "exitCode"] if "result" in called.gives else []
        paths += ["outputs.parameters.p"] * 2 if "p" in called.gives else []
        plain = [called.tag(path) for path in paths]
        computed = [f"{{{{={called.tag(path, True)}}}}}" for path in paths]
        return [*plain, *computed, f"{{{{={called.tag(paths[-1], True)} ?? 'none'}}}}", f"<{plain[-1]}>"]

    def _when(self, before: list[Called], loops: bool) -> str:
        found = list(WHENS)
        if loops and self.chance(60):
            found = ["{{item}} != 2", "'{{item}}' == 'i1'", "{{item.n}} > 1", "{{=item == 'i1'}}"]
        elif before and self.chance(60):
            one = self.chance.one(*before)
            found = [f"{one.tag('status')} == Succeeded", f"{{{{={one.tag('status', True)} != 'Failed'}}}}"]
            if "result" in one.gives:
                found += [f"{one.tag('outputs.result')} == 3", f"'{one.tag('outputs.result')}' != ''"]
                found += [f"{one.tag('exitCode')} == 0"]
        return self.chance.one(*found)

    def _hooks(self, called: Called, conditional: bool = True) -> dict[str, Any]:
        _, template, _ = self.leaf(("echo", "fails", "parameter"))
        template.pop("synchronization", None)  # an error of its lock comes before or after what runs beside
        self.templates.append(template)
        hook: dict[str, Any] = {"template": template["name"]}
        if self.chance(50):
            hook["arguments"] = {"parameters": [{"name": "a", "value": self.chance.one(*self._tags(called))}]}
        if conditional and self.chance(30):
            self.unlimited = True
            phase = self.chance.one("Succeeded", "Failed")
            return {"some": hook | {"expression": f"{called.tag('status', True)} == '{phase}'"}}
        return {"exit": hook}

    def _outputs(self, template: Template, called: list[Called]) -> set[str]:
        gives = set()
        if (sources := [callee for callee in called if "p" in callee.gives]) and self.chance(60):
            one = self.chance.one(*sources)
            given = self.chance.one(
                {"parameter": one.tag("outputs.parameters.p")},
                {"parameter": one.tag("outputs.parameters.p"), "default": "d"},
                {"expression": one.tag("outputs.parameters.p", True)},
                {"expression": f"{one.tag('outputs.parameters.p', True)} ?? 'none'"},
            )
            template.setdefault("outputs", {})["parameters"] = [{"name": "p", "valueFrom": given}]
            gives.add("p")
        if (sources := [callee for callee in called if "f" in callee.gives]) and self.chance(60):
            artifact = {"name": "f", "from": self.chance.one(*sources).tag("outputs.artifacts.f")}
            artifact |= self.chance.one({}, {"optional": True})
            template.setdefault("outputs", {})["artifacts"] = [artifact]
            gives.add("f")
        return gives

    def workflow(self) -> list[dict[str, Any]]:
        top, _ = self.composite(0)
        self.templates.append(top)
        parameters = {"wp": self.chance.one("prod", "dev-1", "a b"), "num": self.chance.one("1", "5", "0.5")}
        parameters |= {"js": '{"a": {"b": [1, 2]}}', "list": self.chance.one('["p", "q"]', "[]", "[1, {}]")}
        given = [{"name": name, "value": value} for name, value in parameters.items()]
        spec: dict[str, Any] = {"entrypoint": top["name"], "arguments": {"parameters": given}}
        limit = {} if self.unlimited else {"parallelism": 1}
        spec |= self.chance.one({}, {}, {}, limit, {"activeDeadlineSeconds": 900})
        if self.chance(4):
            spec["synchronization"] = {"mutexes": [{"name": f"{NAME}-whole"}]}
        if self.chance(15) and not self.daemons:
            _, template, _ = self.leaf(("echo", "fails", "script"))
            self.templates.append(template)
            tag = self.chance.one("{{workflow.status}}", "{{=workflow.status == 'Failed'}}", "{{workflow.name}}")
            hook = {"template": template["name"], "arguments": {"parameters": [{"name": "a", "value": tag}]}}
            spec |= self.chance.one({"onExit": template["name"]}, {"hooks": {"exit": hook}})
        if self.chance(5) and not self.daemons:
            spec["templateDefaults"] = {"retryStrategy": {"limit": "1"}}
        spec["templates"] = self.templates
        if self.chance(6):
            self._spoil(spec, top)
        return self._objects(spec)

    def _objects(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        version = {"apiVersion": "argoproj.io/v1alpha1"}
        beside = []
        if LIMITS in repr((self.templates, self.elsewhere)):
            limits = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{NAME}-limits"}}
            beside.append(limits | {"data": {"one": "1", "two": "2", "text": "few", "none": "0"}})
        if self.elsewhere:
            library = {"kind": "WorkflowTemplate", "metadata": {"name": f"{NAME}-lib"}}
            beside.append(version | library | {"spec": {"templates": self.elsewhere}})
        unique = len({template["name"] for template in self.templates}) == len(self.templates)
        if unique and self.chance(5):  # of what a workflowTemplateRef names, Argo does not check this
            whole = {"kind": "WorkflowTemplate", "metadata": {"name": f"{NAME}-whole"}}
            beside.append(version | whole | {"spec": spec})
            spec = {"workflowTemplateRef": {"name": f"{NAME}-whole"}}
        return [version | {"kind": "Workflow", "metadata": {"name": NAME}, "spec": spec}, *beside]

    def _spoil(self, spec: dict[str, Any], top: Template) -> None:
        """One thing that Argo's own check refuses."""
        holders = [caller for group in top["steps"] for caller in group] if "steps" in top else top["dag"]["tasks"]
        holder = self.chance.one(*holders)
        how = self.chance.between(0, 5)
        if how == 0:
            holder |= {"template": "nowhere"}
            holder.pop("inline", None)
            holder.pop("templateRef", None)
        elif how == 1:
            spec["entrypoint"] = "nowhere"
        elif how == 2:
            holder["arguments"] = {"parameters": [{"name": "a", "value": "{{inputs.parameters.nope}}"}]}
        elif how == 3:
            holders.append(holder) if "dag" in top else top["steps"].append([holder])
        elif how == 4:
            spec["templates"].append(spec["templates"][0])
        else:
            holder["arguments"] = {"parameters": [{"name": "a"}]}


@st.composite
def workflows(draw: st.DrawFn, artifacts: bool = True, slow: bool = False) -> list[dict[str, Any]]:
    """`artifacts`: with those that need a store; `slow`: with those that end by a deadline, seconds later."""
    return Maker(Chance(lambda count: draw(st.integers(0, count - 1))), artifacts, slow).workflow()


def some(count: int, seed: int, artifacts: bool = True) -> Iterator[list[dict[str, Any]]]:
    """`count` of them, each the same for the same seed and place."""
    for place in range(count):
        yield Maker(Chance(random.Random(f"{seed}/{place}").randrange), artifacts).workflow()
