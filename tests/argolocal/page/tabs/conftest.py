"""A home with runs that contain every kind of step, and the process of its page."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.json_text import to_json
from tests.argolocal.page.conftest import MARKUP
from tests.browser import PageServer, start_page

SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><script>top.document.title='hacked'</script></svg>"
PAGE = "<script>top.document.title='hacked'</script>"


def make_script_template(name: str, script: str, **fields: object) -> dict[str, Any]:
    """Return a template that runs a script with bash."""
    return {
        "name": name,
        "container": {"image": "bash:5", "command": ["bash", "-c", script]},
        **fields,
    }


def make_say_task(task: str, template: str = "say", **fields: object) -> dict[str, Any]:
    """Return a task that calls `say`, with a text as its argument."""
    return {
        "name": task,
        "template": template,
        "arguments": {"parameters": [{"name": "text", "value": "x"}]},
        **fields,
    }


SAY_TEMPLATE = make_script_template(
    "say", "echo '{{inputs.parameters.text}}'", inputs={"parameters": [{"name": "text"}]}
)
SHARED_TEMPLATE: dict[str, Any] = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "WorkflowTemplate",
    "metadata": {"name": "shared"},
    "spec": {
        "templates": [
            {
                "name": "outer",
                "dag": {
                    "tasks": [
                        make_say_task("in-a", "echo"),
                        make_say_task("in-b", "echo", depends="in-a"),
                    ]
                },
            },
            {**SAY_TEMPLATE, "name": "echo"},
        ]
    },
}


def make_workflow(name: str, templates: list[dict[str, Any]], **spec: object) -> dict[str, Any]:
    """Return a workflow with the entrypoint `main`."""
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {"entrypoint": "main", "templates": templates, **spec},
    }


def make_zoo() -> dict[str, Any]:
    """Return a workflow with every kind of step, which fails in an item of a loop."""
    heads = "{{tasks.flip.outputs.result}} == "
    tasks = [
        {"name": "flip", "template": "flip"},
        make_say_task("heads", depends="flip", when=f"{heads}heads"),
        make_say_task(
            "tails", depends="flip", when=f"{heads}tails", hooks={"exit": make_say_task("hook")}
        ),
        {
            "name": "loop",
            "template": "maybe",
            "depends": "heads || tails",
            "withSequence": {"count": "5"},
            "arguments": {"parameters": [{"name": "number", "value": "{{item}}"}]},
        },
        {
            "name": "nested",
            "depends": "flip",
            "templateRef": {"name": "shared", "template": "outer"},
        },
        {"name": "flaky", "template": "flaky", "depends": "nested"},
        {"name": "groups", "template": "groups", "depends": "nested"},
        make_say_task("repair", depends="loop.Failed && flaky.Failed"),
        {"name": "last", "template": "inner", "depends": "loop && flaky && groups"},
    ]
    for task in tasks:
        for hook in (task.get("hooks") or {}).values():
            hook.pop("name")

    maybe = make_script_template(
        "maybe",
        'if [ {{inputs.parameters.number}} = 3 ]; then echo "line before"; echo "error: three is bad"; exit 3; fi',
        inputs={"parameters": [{"name": "number"}]},
    )
    groups = {
        "name": "groups",
        "steps": [
            [make_say_task("s1"), make_say_task("s2")],
            [{**make_say_task("each"), "withItems": ["a", MARKUP]}],
        ],
    }
    flaky = make_script_template("flaky", "exit $(( {{retries}} < 1 ))", retryStrategy={"limit": 2})
    return make_workflow(
        "zoo",
        [
            {"name": "main", "dag": {"tasks": tasks}},
            {
                "name": "inner",
                "dag": {"tasks": [make_say_task("deep"), make_say_task("deeper", depends="deep")]},
            },
            make_script_template("flip", "echo -n heads"),
            make_script_template("bye", "echo bye"),
            SAY_TEMPLATE,
            maybe,
            groups,
            flaky,
        ],
        onExit="bye",
    )


def make_artifacts() -> dict[str, Any]:
    """Return a workflow whose artifacts have hostile names and contents."""
    script = f"""
    mkdir -p /tmp/out/folder/inner
    echo '{{"a": [1, 2]}}' > /tmp/out/data.json
    printf 'name,value\\n<b>x</b>,1\\n' > /tmp/out/table.csv
    printf '%s' "{SVG}" > /tmp/out/picture.svg
    printf '%s' "{PAGE}" > /tmp/out/page.html
    printf '%s' "{PAGE}" > '/tmp/out/folder/{MARKUP.replace("'", "").replace("/", "")}.txt'
    printf '\\211PNG\\r\\n\\032\\n' > /tmp/out/folder/inner/dot.png
    head -c 2000000 /dev/zero | tr '\\0' x > /tmp/out/large.txt
    """
    names = ["data.json", "table.csv", "picture.svg", "page.html", "folder", "large.txt"]
    artifacts: list[dict[str, Any]] = [
        {"name": name.replace(".", "-"), "path": f"/tmp/out/{name}"} for name in names
    ]
    artifacts.append({"name": "plain", "path": "/tmp/out/folder", "archive": {"none": {}}})
    return make_workflow(
        "artifacts", [make_script_template("main", script, outputs={"artifacts": artifacts})]
    )


def run_documents(home: Path, *documents: dict[str, Any]) -> None:
    """Run a workflow to its end, with the objects of its file; the run may fail."""
    file = home.parent / f"{documents[-1]['metadata']['name']}.yaml"
    file.write_text("\n---\n".join(map(to_json, documents)))
    process = subprocess.run(
        [sys.executable, "-m", "argolocal", "run", str(file), "--yes"],
        env={**os.environ, "ARGOLOCAL_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert process.returncode in (0, 1), process.stderr


@pytest.fixture(scope="session")
def zoo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("zoo") / "home"
    run_documents(home, SHARED_TEMPLATE, make_zoo())
    run_documents(home, make_artifacts())
    return home


@pytest.fixture(scope="session")
def zoo_page(zoo_home: Path) -> Iterator[PageServer]:
    with start_page(zoo_home) as server:
        yield server


@pytest.fixture
def suspended_home(tmp_path: Path) -> Iterator[Path]:
    """A home with a run that waits for an approval."""
    tasks = [
        {"name": "approve", "template": "approve"},
        {"name": "then", "template": "ok", "depends": "approve"},
    ]
    manifest = make_workflow(
        "waits",
        [
            {"name": "main", "dag": {"tasks": tasks}},
            {"name": "approve", "suspend": {}},
            make_script_template("ok", "true"),
        ],
    )
    file = tmp_path / "workflow.json"
    file.write_text(to_json(manifest))
    home = tmp_path / "home"
    process = subprocess.Popen(
        [sys.executable, "-m", "argolocal", "run", str(file), "--yes"],
        env={**os.environ, "ARGOLOCAL_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield home
    process.send_signal(signal.SIGINT)
    process.wait(30)
