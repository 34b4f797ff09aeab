"""The graph contains every step of the manifest, at any size, and a user can reach every step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import Browser, expect

from argolocal.errors import ConfigError
from argolocal.page.sources import LocalRuns, Run
from argolocal.page.tabs.graph import Drawing, Graph
from argolocal.page.tabs.graph_fold import IsInternal
from argolocal.page.tabs.graph_plan import Plan
from argolocal.page.tabs.graph_words import (
    describe_counts,
    describe_counts_briefly,
    describe_dependencies,
    describe_omission,
    describe_reuse,
    simplify_condition,
)
from argolocal.runner.run import resume_suspended
from argolocal.state.journal import RunFiles
from tests.argolocal.page.tabs.conftest import SAY_TEMPLATE, make_say_task, make_workflow
from tests.browser import PageServer, start_page
from tests.waiting import until

MAX_BOXES = 300


def make_run(tasks: list[dict[str, Any]], nodes: Mapping[str, str], **status: object) -> Run:
    """Return a run of a DAG. `nodes`: maps the suffix of a node's name, such as a task, to its
    phase."""
    manifest = make_workflow("run", [{"name": "main", "dag": {"tasks": tasks}}, SAY_TEMPLATE])
    rows = [("run", "DAG", status.get("phase", "Running"))]
    rows += [(f"run.{suffix}", "Pod", phase) for suffix, phase in nodes.items()]
    records = {
        name: {"id": name, "name": name, "displayName": name, "type": type, "phase": phase}
        for name, type, phase in rows
    }
    return Run("run", manifest, {"phase": "Running", **status, "nodes": records}, "1")


def draw_graph(
    run: Run,
    query: Mapping[str, str] | None = None,
    is_internal: IsInternal = lambda step: False,
) -> Graph:
    return Drawing(Plan(run), query or {}, is_internal).draw()


def list_labels(graph: Graph) -> list[str]:
    return [node.label for node in graph.nodes]


def parse_query(toggle: str) -> dict[str, str]:
    """Return the query parameters of a URL."""
    return {
        name: values[0] for name, values in parse_qs(toggle[1:], keep_blank_values=True).items()
    }


def find_reachable_steps(run: Run) -> set[str]:
    """Return the labels of all steps that are drawn if a user opens every box."""
    seen: set[str] = set()
    queries: list[dict[str, str]] = [{"open": ""}]
    tried: set[str] = set()
    while queries:
        graph = draw_graph(run, queries.pop())
        assert len(graph.nodes) <= MAX_BOXES
        for node in graph.nodes:
            if node.kind not in ("fold", "more"):
                seen.add(node.label)
            if node.toggle and not node.is_open and node.name not in tried:
                tried.add(node.name)
                queries.append(parse_query(node.toggle))
    return seen


@pytest.fixture(scope="module")
def zoo(zoo_home: Path) -> Run:
    return LocalRuns(zoo_home).read("zoo")


def test_a_step_that_has_not_started_is_drawn_with_its_condition(zoo: Run) -> None:
    run = make_run(
        [
            make_say_task("a"),
            make_say_task("b", depends="a", when="{{tasks.a.outputs.result}} == 1"),
        ],
        {},
    )
    boxes = {node.label: node for node in draw_graph(run).nodes}
    assert boxes["b"].phase == "Planned"
    assert boxes["b"].detail == "if a.result == 1"
    assert boxes["b"].condition == "after a, if a.result == 1"

    boxes = {node.label: node for node in draw_graph(zoo).nodes}
    assert boxes["tails"].phase == "Skipped"
    assert boxes["tails"].detail.startswith("not true: flip.resul")
    assert boxes["repair"].phase == "Omitted"
    assert boxes["repair"].condition == "after loop failed and flaky failed"


def test_groups_loops_and_retries_are_drawn(zoo: Run) -> None:
    boxes = {node.label: node for node in draw_graph(zoo).nodes}
    assert boxes["loop"].detail == "1 of 5 failed"
    assert boxes["flaky"].detail.startswith("2 attempts")
    # groups of a small run are open, and the template of another object is drawn inside
    assert {"in-a", "in-b", "s1", "s2", "each"} <= boxes.keys()
    assert boxes["nested"].x < boxes["in-a"].x
    assert boxes["in-a"].y < boxes["in-b"].y


def test_hooks_and_exit_handlers_are_apart(zoo: Run) -> None:
    hooks = {hook.name: hook for hook in draw_graph(zoo).hooks}
    assert hooks["onExit"].label == "bye"
    assert hooks["onExit"].phase == "Succeeded"
    assert hooks["tails.onExit"].owner == "tails"
    assert "bye" not in list_labels(draw_graph(zoo))


def test_a_group_closes_and_a_loop_opens_by_its_address(zoo: Run) -> None:
    boxes = {node.label: node for node in draw_graph(zoo).nodes}
    closed = draw_graph(zoo, parse_query(boxes["nested"].toggle))
    assert "in-a" not in list_labels(closed)
    assert "s1" in list_labels(closed)

    with_items = draw_graph(zoo, parse_query(boxes["loop"].toggle))
    assert [node.label for node in with_items.nodes if node.name.startswith("loop(")] == list(
        "01234"
    )


def test_the_graph_of_one_group_has_an_address(zoo: Run) -> None:
    graph = draw_graph(zoo, {"root": "groups"})
    assert "flip" not in list_labels(graph)
    assert {"s1", "s2", "each"} <= set(list_labels(graph))
    assert [crumb.label for crumb in graph.crumbs] == ["zoo", "groups"]
    for address in ("flip", "nothing", "../..", "groups]["):
        with pytest.raises(ConfigError):
            draw_graph(zoo, {"root": address})


def test_equal_tasks_are_one_box_that_opens() -> None:
    tasks = [
        make_say_task("start"),
        *(make_say_task(f"part-{i}", depends="start") for i in range(300)),
    ]
    names = [f"part-{i}" for i in range(300)]
    tasks.append({**make_say_task("end"), "dependencies": names})
    phases = {"start": "Succeeded", **dict.fromkeys(names, "Succeeded"), "part-250": "Failed"}
    run = make_run(tasks, phases)

    graph = draw_graph(run)
    assert len(graph.nodes) == 3
    box = next(node for node in graph.nodes if node.kind == "fold")
    assert box.detail == "1 of 300 failed"
    assert box.phase == "Failed"
    assert graph.hidden

    graph = draw_graph(run, parse_query(box.toggle))
    assert "part-250" in list_labels(graph)
    assert "all 300 steps" in list_labels(graph)


@pytest.mark.parametrize("template_count", [1, 700])
def test_a_large_graph_is_drawn_in_few_boxes_and_every_step_is_reachable(
    template_count: int,
) -> None:
    count = 700
    tasks = [
        {
            "name": f"t{i}",
            "inline": {**SAY_TEMPLATE, "name": f"say-{i % template_count}"},
            "dependencies": [f"t{i - 7}"] if i >= 7 else [],
        }
        for i in range(count)
    ]
    run = make_run(tasks, {f"t{i}": "Succeeded" for i in range(count)})
    assert len(draw_graph(run).nodes) <= 60
    assert find_reachable_steps(run) == {f"t{i}" for i in range(count)}


def test_a_wide_graph_of_different_tasks_is_one_list() -> None:
    tasks = [{"name": f"t{i}", "inline": {**SAY_TEMPLATE, "name": f"say-{i}"}} for i in range(200)]
    graph = draw_graph(make_run(tasks, {}))
    assert len(graph.nodes) == 1
    assert "all 200 steps" in list_labels(
        draw_graph(make_run(tasks, {}), parse_query(graph.nodes[0].toggle))
    )


def test_a_template_that_calls_itself_ends() -> None:
    run = make_run([make_say_task("a"), {"name": "again", "template": "main", "depends": "a"}], {})
    assert list_labels(draw_graph(run)).count("again") < 20
    graph = draw_graph(run, {"open": "again again.again again.again.again"})
    assert list_labels(graph).count("again") == 4


def test_internal_steps_are_hidden_and_their_dependents_stay_connected() -> None:
    tasks = [
        make_say_task("a"),
        make_say_task("secret", depends="a"),
        make_say_task("b", depends="secret"),
    ]
    run = make_run(tasks, {})

    graph = draw_graph(run, None, lambda step: step.label == "secret")
    assert list_labels(graph) == ["a", "b"]
    assert len(graph.edges) == 1
    assert graph.internal_count == 1

    graph = draw_graph(run, parse_query(graph.internal_link), lambda step: step.label == "secret")
    assert list_labels(graph) == ["a", "secret", "b"]


def test_the_templates_of_a_cluster_are_found() -> None:
    """A cluster keeps the templates of other objects in the status, together with the scope of each
    template."""
    manifest = {"spec": {"workflowTemplateRef": {"name": "x"}}}
    status = {
        "phase": "Running",
        "nodes": {},
        "storedWorkflowTemplateSpec": {
            "entrypoint": "main",
            "templates": [
                {
                    "name": "main",
                    "dag": {
                        "tasks": [
                            {"name": "a", "templateRef": {"name": "shared", "template": "outer"}}
                        ]
                    },
                }
            ],
        },
        "storedTemplates": {
            "namespaced/shared/outer": {
                "name": "outer",
                "steps": [[make_say_task("inner", "echo")]],
            },
            "namespaced/shared/echo": {**SAY_TEMPLATE, "name": "echo"},
        },
    }
    run = Run("run", manifest, status, "1")
    plan = Plan(run)
    assert list_labels(draw_graph(run)) == ["a", "inner"]
    assert plan.path("a[0].inner")[-1].template["name"] == "echo"


def test_a_manifest_that_lacks_fields_is_drawn() -> None:
    for manifest in ({}, {"spec": {}}, {"spec": {"entrypoint": "x", "templates": []}}):
        assert list_labels(draw_graph(Run("run", manifest, {"phase": "", "nodes": {}}, "1"))) == [
            "run"
        ]


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("{{=tasks.evaluate.outputs.parameters.verdict == 'release'}}", "evaluate.verdict == 'release'"),
        ("{{tasks.flip.outputs.result}} == heads && {{inputs.parameters.x}} > 3", "flip.result == heads and x > 3"),
        ("{{=asInt(steps['a-b'].outputs.parameters['n-x']) > 3}}", "a-b.n-x > 3"),
        ("'{{tasks.a.outputs.parameters.b}}' == 'x' || {{item}} == 2", "a.b == 'x' or item == 2"),
        ("{{workflow.status}} != Succeeded", "workflow.status != Succeeded"),
        ("steps.train.status == 'Failed'", "train.status == 'Failed'"),
        ("{{= broken", "broken"),
    ],
)  # fmt: skip
def test_conditions_are_in_words(condition: str, words: str) -> None:
    assert simplify_condition(condition) == words


@pytest.mark.parametrize(
    ("task", "phases", "words"),
    [
        ({"depends": "clean"}, {"clean": "Failed"}, "not run, because clean failed"),
        (
            {"depends": "a && b.Failed && c"},
            {"a": "Succeeded", "b": "Succeeded", "c": "Skipped"},
            "not run, because b succeeded",
        ),
        (
            {"dependencies": ["a", "b"]},
            {"a": "Omitted", "b": "Error"},
            "not run, because a was not run and b had an error",
        ),
        ({"depends": "!a"}, {"a": "Succeeded"}, "not run, because a succeeded"),
        ({"depends": "a"}, {}, ""),
    ],
)
def test_the_reason_of_an_omitted_step_is_named(
    task: dict[str, Any], phases: dict[str, str], words: str
) -> None:
    assert describe_omission(task, phases) == words


def test_the_source_of_a_cached_result_is_named() -> None:
    message = "when ''demo-1/prepare' == ''' evaluated false"
    assert describe_reuse(message) == "result of demo-1/prepare"
    assert describe_reuse("memoized") == "memoized"


def test_dependencies_and_counts_are_in_words() -> None:
    assert describe_dependencies({"dependencies": ["a", "b-c"]}) == "a and b-c"
    words = describe_dependencies({"depends": "a.Failed && !(b.Succeeded || c-1)"})
    assert words == "a failed and not (b succeeded or c-1)"
    counts = {"Succeeded": 7, "Failed": 1, "Running": 2}
    assert describe_counts(counts) == "7 of 10 succeeded, 1 failed, 2 running"
    assert describe_counts_briefly(counts) == "1 of 10 failed"
    assert describe_counts_briefly({"Succeeded": 2, "Running": 2}) == "2 of 4 done"


def test_the_page_of_5000_items_is_small_and_lists_all_of_them(
    zoo_home: Path, zoo_page: PageServer, browser: Browser
) -> None:
    count = 5000
    loop = make_say_task("each", withSequence={"count": str(count)})
    manifest = make_workflow("large", [{"name": "main", "dag": {"tasks": [loop]}}, SAY_TEMPLATE])
    names = ["large", "large.each", *(f"large.each({i}:{i})" for i in range(count))]
    types = ["DAG", "TaskGroup", *["Pod"] * count]
    nodes = {
        name: {
            "id": name,
            "name": name,
            "displayName": name,
            "type": type,
            "phase": "Succeeded",
            "startedAt": "2026-01-01T00:00:00Z",
        }
        for name, type in zip(names, types, strict=True)
    }
    nodes["large.each(4321:4321)"]["phase"] = "Failed"
    files = RunFiles(zoo_home, "large")
    files.create(manifest)
    files.snapshot({"phase": "Failed", "nodes": nodes})
    files.close()

    assert len(zoo_page.get("/runs/large", "text/html").content) < 200_000
    tab = zoo_page.open(browser, "/runs/large")
    expect(tab.get_by_role("link", name="each: 1 of 5,000 failed", exact=False)).to_be_visible()
    tab.get_by_role("link", name="Open each").click()
    expect(tab.get_by_role("link", name="4321: failed", exact=False)).to_be_visible()
    tab.get_by_role("link", name="all 5,000 items", exact=False).click()
    expect(tab.get_by_text("page 1 of 50")).to_be_visible()
    expect(tab.get_by_role("region", name="Steps of this group")).to_contain_text("4321")


def test_the_graph_changes_without_a_reload(suspended_home: Path, browser: Browser) -> None:
    source = LocalRuns(suspended_home)
    until(
        "the run waits", lambda: "waits" in source.names() and source.read("waits").status["nodes"]
    )
    with start_page(suspended_home) as server:
        tab = server.open(browser, "/runs/waits")
        expect(tab.get_by_role("link", name="approve: waiting", exact=False)).to_be_visible()
        expect(tab.get_by_role("link", name="then: not started", exact=False)).to_be_visible()
        resume_suspended("waits", {}, suspended_home)
        expect(tab.get_by_role("link", name="then: succeeded", exact=False)).to_be_visible()
        expect(tab.get_by_text("The run succeeded in", exact=False)).to_be_visible()


def test_a_group_opens_and_closes_in_a_browser_without_scripts(
    zoo_page: PageServer, browser: Browser
) -> None:
    tab = zoo_page.open(browser, "/runs/zoo", java_script_enabled=False)
    expect(tab.get_by_role("link", name="in-a: succeeded", exact=False)).to_be_visible()
    tab.get_by_role("link", name="Close nested").click()
    expect(tab.get_by_role("link", name="Open nested")).to_be_visible()
    expect(tab.get_by_role("link", name="in-a: succeeded", exact=False)).to_have_count(0)
    tab.get_by_role("link", name="Open loop").click()
    tab.get_by_role("link", name="3: failed", exact=False).click()
    expect(tab.get_by_role("heading", name="loop(3:3)", exact=True)).to_be_visible()
    expect(tab.get_by_role("region", name="Log of the step")).to_contain_text("three is bad")
