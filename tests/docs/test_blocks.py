"""Tests of all code blocks of the documents, by language: files can be loaded, fragments of Python
run, and commands exist.

Commands that only read are run, the commands in COMMANDS_BY_NEED are only parsed, and
test_stories.py runs all other commands.
"""

import ast
import contextlib
import importlib
import inspect
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from argolocal import cli as argolocal_cli
from argolocal.pods.container_images import Image
from argolocal.validate import lint
from rekindle import blocks as rekindle_blocks
from rekindle import project
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.cli import commands
from rekindle.step import format_flag, load_step_module
from rekindle.training.cost.prices import PRICES_FILE, Prices
from tests.commands import DOCUMENTS, READ_COMMANDS, README, ROOT, Block, list_blocks, write_files
from tests.docs.pages import API, COMMANDS

GROUP_BY_PROGRAM = {"rekindle": commands, "argolocal": argolocal_cli.commands}
BLOCKS = [block for document in DOCUMENTS for block in list_blocks(document)]
# requirement that tests lack → commands that are only parsed; tests/cluster runs the commands that
# need a cluster
COMMANDS_BY_NEED = {
    "a cluster": {
        "kubectl",
        "helm",
        "rekindle submit",
        "rekindle schedule",
        "rekindle run-now",
        "rekindle unschedule",
        "rekindle delete",
        "rekindle platform check",
        "rekindle scale",
    },
    "a builder and a registry": {"docker", "buildah", "rekindle images build"},
    "a served model, MLflow or a notebook": {"curl", "mlflow", "jupyter"},
    "several machines": {"torchrun"},
    "systemd": {"systemctl", "loginctl"},
    # tests/argolocal/server/api/test_argo_command.py
    "an Argo server": {"argo"},
    # tests/rekindle/operations/reproduce/test_reproduction.py
    "a release and its repository": {"rekindle reproduce"},
    "nothing that could fail": {
        "export",
        "eval",
        "cd",
        ".",
        "echo",
        "printf",
        "cat",
        "install",
        "openssl",
    },
    "this repository, and minutes": {"make", "python", "pre-commit", ".ci/run", "uv"},
}
CONFIG = {
    "name": "page",
    "workload": "steps.digits",
    "data": {"source": "sklearn://digits"},
    "train": {"validation": 0.1},
}  # settings that complete the fragments of configs on a page
EARLIER_PAGES = {
    **{name: ["your-own-model.md"] for name in ("your-own-pipeline.md", "time.md")},
    "other-jobs.md": ["your-own-program.md"],
    "sweep.md": ["your-own-program.md"],
}  # page → earlier pages whose files the page uses


@pytest.fixture
def folder(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a directory with the files of the page; unload the modules of these files after the
    test."""
    for name in [*EARLIER_PAGES.get(block.document.name, []), block.document.name]:
        write_files(block.document.with_name(name), tmp_path)

    shutil.copytree(ROOT / "configs", tmp_path / "configs", dirs_exist_ok=True)
    shutil.copy(ROOT / "template/data/power.csv", tmp_path)
    (tmp_path / "payments.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path

    for name in [
        name
        for name, module in sys.modules.items()
        if str(tmp_path) in (getattr(module, "__file__", "") or "")
    ]:
        del sys.modules[name]


def tries_a_workload(block: Block) -> bool:
    """Return True if a command of the block starts a process that loads torch and a workload."""
    return any(
        command.startswith(("rekindle check", "rekindle lint")) for command in block.commands
    )


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=str(block),
            # a block of the README is not slow, because it uses a faster command
            marks=pytest.mark.slow if block.document != README and tries_a_workload(block) else (),
        )
        for block in BLOCKS
    ],
)
def test_a_code_block_of_the_docs_works(block: Block, folder: Path) -> None:
    check = CHECKS.get(block.language)
    assert check, (
        f"{block}: no check exists for the language {block.language!r}: use one of"
        f" {', '.join(CHECKS)}"
    )
    check(block, folder)


def _check_commands(block: Block, folder: Path) -> None:
    for line in block.commands:
        for words in _simple_commands(line):
            _check_command(block, words)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the simple commands of a line, from pipelines, lists and `$(...)`, without
    redirections."""
    for inner_command in re.findall(r"\$\(([^()]*)\)", line):
        yield from _simple_commands(inner_command)

    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)

    lexer.whitespace_split = True
    for word in [*lexer, ";"]:
        if not re.fullmatch(r"[|&;]+", word):
            words.append(word)
        elif words:
            yield words
            words = []


def _check_command(block: Block, words: list[str]) -> None:
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]

    program, *arguments = words
    name = program

    if program in GROUP_BY_PROGRAM:
        name, context = _parse_arguments(block, program, arguments)
        if context and name.startswith(READ_COMMANDS):
            _run_program(block, program, arguments)

        is_for_cluster = {"--cluster", "-n", "--namespace"} & {*arguments}
        if name.startswith(READ_COMMANDS) or block.language == "console" or is_for_cluster:
            return
    elif program == "make" and arguments:
        makefiles = [ROOT / "Makefile", ROOT / "template/Makefile"]
        assert any(
            re.search(rf"^{arguments[0]}:", file.read_text(), re.MULTILINE) for file in makefiles
        ), block
    elif program.endswith("python") and arguments[0] == "-m":
        assert arguments[1] == "pytest" or find_spec(arguments[1]), f"{block}: {' '.join(words)}"
        name = "python"

    assert any(name in names for names in COMMANDS_BY_NEED.values()), (
        f"{block}: nothing checks `{' '.join(words)}`: see COMMANDS_BY_NEED"
    )


def _parse_arguments(
    block: Block, name: str, arguments: list[str]
) -> tuple[str, click.Context | None]:
    """Return the full name and the click context of a command; None if the command only shows its
    help."""
    command_group: Any = GROUP_BY_PROGRAM[name]
    while isinstance(command_group, click.Group):
        assert arguments, f"{block}: {name} has no command {arguments[:1]}"
        assert arguments[0] in command_group.commands, (
            f"{block}: {name} has no command {arguments[:1]}"
        )
        name = f"{name} {arguments[0]}"
        command_group = command_group.commands[arguments[0]]
        arguments = arguments[1:]

    try:
        return name, command_group.make_context(name, list(arguments))
    except click.exceptions.Exit:
        return name, None
    except click.ClickException as error:
        pytest.fail(f"{block}: {name}: {error.format_message()}")


def _run_program(block: Block, program: str, arguments: list[str]) -> None:
    """Run a command of Rekindle or argolocal in this process."""
    try:
        code = GROUP_BY_PROGRAM[program].main(arguments, standalone_mode=False)
    except SystemExit as error:
        code = error.code
    assert code in (None, 0), f"{block}: {' '.join(arguments)} ended with {code}"


def _check_yaml(block: Block, folder: Path) -> None:
    """Check a manifest for Argo, prices, the table of images, or a config (complete or some
    sections)."""
    documents = list(yaml.safe_load_all(block.text))
    if "kind" in documents[0]:
        findings = [finding for document in documents for finding in lint(document)]
        assert [str(finding) for finding in findings if finding.fatal] == [], block
    elif block.file == PRICES_FILE:
        Prices.parse(documents[0], str(block))
    elif all(isinstance(value, dict) for value in documents[0].values()) and "." in next(
        iter(documents[0])
    ):
        (folder / "images.yaml").write_text(block.text)
        assert Image.read_table(folder / "images.yaml")
    else:
        file = folder / (block.file or "fragment.yaml")
        if not block.file:
            file.write_text(yaml.safe_dump(CONFIG | documents[0]))

        load_config(file, environment={})


def _check_python(block: Block, folder: Path) -> None:
    """Import a file as a module; run a fragment after the previous fragments of its page, and
    inside of a pipeline if the fragment uses blocks."""
    tree = ast.parse(block.text, str(block))
    _check_calls(block, tree)

    if block.file:
        project.load_module(block.file.removesuffix(".py").replace("/", "."), "step", ())
    # a fragment that needs MLflow is not run here, because test_stories.py runs it
    elif not _find_imports(tree) & {"mlflow"}:
        fragments = [
            other
            for other in list_blocks(block.document, "python")
            if not other.file and other.line <= block.line
        ]

        config = load_config(ROOT / "tests/golden/config.yaml", environment={}).config

        namespace: dict[str, Any] = {
            "config": config,
            "rekindle": importlib.import_module("rekindle"),
            "blocks": rekindle_blocks,
        }

        for fragment in fragments:
            code = compile(fragment.text, str(fragment), "exec")
            needs_pipeline = "blocks." in fragment.text and "blocks.pipeline" not in fragment.text
            with rekindle_blocks.pipeline(config) if needs_pipeline else contextlib.nullcontext():
                exec(code, namespace)


def _find_imports(tree: ast.AST) -> set[str]:
    """Return all modules that a piece of code imports."""
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return names | {
        node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }


def _check_calls(block: Block, tree: ast.AST) -> None:
    """Check that names of Rekindle and Hera exist and accept their arguments, also inside of
    functions that are not called."""
    names: dict[str, Any] = {
        "argolocal": importlib.import_module("argolocal"),
        "rekindle": importlib.import_module("rekindle"),
        "blocks": rekindle_blocks,
        "Config": Config,
    }

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "argolocal",
            "rekindle",
            "hera",
        ):
            for alias in node.names:
                module = importlib.import_module(node.module or "")
                assert hasattr(module, alias.name), f"{block}: {node.module} has no {alias.name}"
                names[alias.asname or alias.name] = getattr(module, alias.name)

    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("argolocal", "rekindle", "blocks")
        ):
            assert hasattr(names[node.value.id], node.attr), (
                f"{block}: {ast.unparse(node)} does not exist"
            )

        if (
            isinstance(node, ast.Call)
            and (function := _resolve_name(node.func, names))
            and not inspect.isclass(function)
        ):
            keyword_arguments = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(function).bind_partial(*node.args, **keyword_arguments)


def _resolve_name(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve_name(node.value, names), node.attr, None)
    return None


def _check_dockerfile(block: Block, folder: Path) -> None:
    steps = [
        line.split()[0]
        for line in block.text.replace("\\\n", "").splitlines()
        if line and line[0] not in "# "
    ]
    assert set(steps) <= {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR"}, block
    assert "FROM" in steps, block


def _check_mermaid(block: Block, folder: Path) -> None:
    assert block.text.split()[0] in ("flowchart", "sequenceDiagram", "stateDiagram-v2"), block


def _check_drawing(block: Block, folder: Path) -> None:
    command_lines = re.findall(
        r"^\s*(?:\$ .*|rekindle .*|import .*|kubectl .*)$", block.text, re.MULTILINE
    )
    assert command_lines == [], f"{block}: give it a language, so that it is checked"


def _check_text(block: Block, folder: Path) -> None:
    assert block.document in (
        API,
        COMMANDS,
    ), f"{block}: only generated pages may contain unchecked text"


CHECKS = {
    "": _check_drawing,
    "console": _check_commands,
    "sh": _check_commands,
    "python": _check_python,
    "yaml": _check_yaml,
    "json": lambda block, folder: json.loads(block.text),
    "dockerfile": _check_dockerfile,
    "mermaid": _check_mermaid,
    "text": _check_text,
}


def test_documented_flags_of_steps_exist() -> None:
    for block in BLOCKS:
        for module, flags_text in re.findall(
            r"rekindle step (steps\.(?:prepare|train|evaluate|release|verify))\b(.*)", block.text
        ):
            fields = {
                format_flag(name) for name in load_step_module(module).Inputs.model_fields
            } | {
                "--output",
                "--help",
            }
            assert set(re.findall(r"--[\w-]+", flags_text)) <= fields, block


@pytest.mark.parametrize("document", DOCUMENTS[:-1], ids=lambda path: path.name)
def test_targets_of_links_exist(document: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_page_can_be_reached_from_the_readme() -> None:
    pages = [ROOT / "README.md"]
    reached = set[Path]()
    while pages:
        reached.add(page := pages.pop())
        linked = [
            page.parent / target for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        ]
        pages += {path.resolve() for path in linked if path.suffix == ".md"} - reached
    assert set((ROOT / "docs").glob("*.md")) <= reached
    shown = "".join(page.read_text() for page in reached)
    assert [file.name for file in (ROOT / "docs").glob("*.??g") if file.name not in shown] == []


def test_folders_in_contributing_exist() -> None:
    folders = "argolocal|rekindle|steps|pipelines|images|tests|docs"
    for path in re.findall(rf"`((?:{folders})/[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text()):
        assert (ROOT / path.replace("STEP", "prepare")).exists(), path
