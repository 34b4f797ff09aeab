"""Tests of the public API: all names are documented, known to type checkers, and imported only when
used."""

import ast
import difflib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import argolocal
import rekindle
from tests.commands import ROOT
from tests.docs.pages import API, COMMANDS, TRAINING

PAGES = [(API, "api_page"), (COMMANDS, "commands_page"), (TRAINING, "training_page")]


@pytest.mark.parametrize(("page", "maker"), PAGES)
def test_the_generated_pages_match_docstrings_and_help(page: Path, maker: str) -> None:
    # make the page in a new process, as a reader does
    script = f"from tests.docs.pages import {maker}; print({maker}(), end='')"
    text = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    differing = "\n".join(
        difflib.unified_diff(page.read_text().splitlines(), text.splitlines(), lineterm="", n=0)
    )
    assert not differing, f"update it with `python -m tests.docs.pages`:\n{differing}"


@pytest.mark.parametrize("package", [rekindle, argolocal], ids=["rekindle", "argolocal"])
def test_the_stubs_list_the_same_names_and_modules(package: ModuleType) -> None:
    stub = ast.parse((ROOT / package.__name__ / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = vars(package)["PUBLIC_NAMES"].items()
    modules = {name: f"{package.__name__}.{module}" for module, public in names for name in public}
    assert {alias.name: node.module for node in imports for alias in node.names} == modules
    exported = next(
        ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)
    )
    assert sorted(exported) == sorted(package.__all__)


@pytest.mark.parametrize(
    ("statement", "free_of"),
    [
        ("import rekindle", {"pydantic", "hera", "torch", "boto3", "rekindle.step"}),
        (
            "from rekindle import Artifact, StepInputs, StepOutputs",
            {"hera", "torch", "boto3", "rekindle.blocks.manifest.config"},
        ),
        (
            "from rekindle import Evaluation, Prepared",
            {"hera", "torch", "boto3", "rekindle.blocks.manifest.config"},
        ),
        ("import rekindle.training.membership.server", {"torch", "boto3"}),
    ],
)
def test_an_import_loads_only_its_own_modules(statement: str, free_of: set[str]) -> None:
    script = f"{statement}; import sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not free_of & set(loaded)


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = rekindle.no_such_name  # pyright: ignore[reportAttributeAccessIssue]
