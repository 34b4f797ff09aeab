"""The public API: documented name by name, known to type checkers, and free of charge for whoever does not use it."""

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
def test_the_pages_say_what_the_docstrings_and_the_help_say(page: Path, maker: str) -> None:
    script = f"from tests.docs.pages import {maker}; print({maker}(), end='')"  # a process of its own, like a reader's
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    differing = "\n".join(difflib.unified_diff(page.read_text().splitlines(), made.splitlines(), lineterm="", n=0))
    assert not differing, f"python -m tests.docs.pages writes it anew:\n{differing}"


@pytest.mark.parametrize("package", [rekindle, argolocal], ids=["rekindle", "argolocal"])
def test_type_checkers_know_the_same_names_from_the_same_modules(package: ModuleType) -> None:
    stub = ast.parse((ROOT / package.__name__ / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = vars(package)["NAMES"].items()
    modules = {name: f"{package.__name__}.{module}" for module, public in names for name in public}
    assert {alias.name: node.module for node in imports for alias in node.names} == modules
    exported = next(ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(exported) == sorted(package.__all__)


@pytest.mark.parametrize(
    ("statement", "free_of"),
    [
        ("import rekindle", {"pydantic", "hera", "torch", "boto3", "rekindle.step"}),
        (
            "from rekindle import Artifact, StepInputs, StepOutputs",
            {"hera", "torch", "boto3", "rekindle.blocks.manifest.config"},
        ),
        ("from rekindle import Evaluation, Prepared", {"hera", "torch", "boto3", "rekindle.blocks.manifest.config"}),
    ],
)
def test_an_import_loads_what_it_names_and_no_more(statement: str, free_of: set[str]) -> None:
    script = f"{statement}; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not free_of & set(loaded)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = rekindle.no_such_name  # pyright: ignore[reportAttributeAccessIssue]
