"""The public API: documented name by name, known to type checkers, and free of charge for whoever does not use it.

python -m tests.rekindle.test_api        brings the entries of docs/api.md up to date
"""

import ast
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

import rekindle
from tests.commands import ROOT

PAGE = ROOT / "docs" / "api.md"


def signature(name: str, value: Any) -> str:
    """`name(a, b=1)` of a function or a class that is called; a class to inherit from has its bases and fields."""
    if inspect.isclass(value) and (issubclass(value, (BaseModel, Exception)) or getattr(value, "_is_protocol", False)):
        return f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    shown, star = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown, star = [*shown, "*"], True
        default = parameter.default
        text = "" if default is parameter.empty else f"={default!r}" if "<" not in repr(default) else "=..."
        shown.append(f"{parameter.name}{text}")
    return f"{name}({', '.join(shown)})"


def entry(name: str) -> str:
    """What the page must say about a name."""
    value = getattr(rekindle, name)
    if marks := getattr(value, "__metadata__", None):  # Artifact is an annotated type
        return f"- **`{name}`** {marks[0].__doc__}"
    assert value.__doc__, f"{name} has no docstring"
    return f"- **`{signature(name, value)}`** {inspect.cleandoc(value.__doc__).splitlines()[0]}"


@pytest.mark.parametrize("name", rekindle.__all__)
def test_every_name_is_on_the_page_with_its_signature_and_what_it_is(name: str) -> None:
    assert entry(name) in PAGE.read_text()


def test_type_checkers_know_the_same_names_from_the_same_modules() -> None:
    stub = ast.parse((ROOT / "rekindle" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == vars(rekindle)["MODULES"]
    exported = next(ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(exported) == sorted(rekindle.__all__)


@pytest.mark.parametrize(
    ("statement", "free_of"),
    [
        ("import rekindle", {"pydantic", "hera", "torch", "boto3", "rekindle.step"}),
        ("from rekindle import Artifact, StepInputs, StepOutputs", {"hera", "torch", "boto3", "rekindle.config"}),
        ("from rekindle import Evaluation, Prepared", {"hera", "torch", "boto3", "rekindle.config"}),
    ],
)
def test_an_import_loads_what_it_names_and_no_more(statement: str, free_of: set[str]) -> None:
    script = f"{statement}; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not free_of & set(loaded)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = rekindle.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    text = PAGE.read_text()
    for public in rekindle.__all__:
        old = rf"^- \*\*`(class )?{public}[`(].*$"
        text = re.sub(old, entry(public).replace("\\", r"\\"), text, flags=re.MULTILINE)
    PAGE.write_text(text)
