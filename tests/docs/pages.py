"""Generate docs/api.md and docs/commands.md from docstrings, and the table of settings in
docs/training.md.

python -m tests.docs.pages        writes them
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click
from pydantic_core import PydanticUndefined

import rekindle
from rekindle import blocks, project
from rekindle.blocks.manifest.config import describe_keys
from rekindle.cli import commands
from rekindle.cli.group import SECTIONS
from tests.commands import ROOT

API = ROOT / "docs/api.md"
COMMANDS = ROOT / "docs/commands.md"
TRAINING = ROOT / "docs/training.md"
SETTINGS_TABLE = re.compile(
    r"(?<=<!-- settings of train: generated -->\n).*?(?=<!-- end -->)", re.DOTALL
)
WIDTH = 100
FURTHER_MODULES = (
    "tracking",
    "release.predictor",
    "release.release_files",
    "release.model_client",
    "release.compare",
)

API_HEAD = """\
# The Python API

Generated from the docstrings by `python -m tests.docs.pages`. After `import rekindle` each name below is imported on
its first use, so a step needs only the packages of the names that it uses.
"""
COMMANDS_HEAD = """\
# Commands

Generated from `--help` by `python -m tests.docs.pages`.

- A value of the config is the default < the file < the environment (`REKINDLE_TRAIN__WORKERS=3`) < `--set`. A mistyped
  key is an error that names the nearest one.
- `-o json` prints one object (`lint` a list, `logs` one object per line) on stdout, and everything else on stderr.
- Set `S3_ENDPOINT_URL` and `MLFLOW_TRACKING_URI` to use real services instead of the embedded ones. `REKINDLE_HOME` is
  the directory of the runs and the embedded services (`.rekindle`), `REKINDLE_PATH` the folders of the project. The
  default is the project of the config, else of the working directory.
- `rekindle run --manifest workflow.yaml -p name=value` runs any Argo manifest, and refuses fields that would not behave
  as on Argo by name: [supported fields](argo-fields.md).
"""


def commands_page() -> str:
    """Return the help of all commands, in the sections of `rekindle --help`."""
    page_parts = [COMMANDS_HEAD]
    for title, names in SECTIONS.items():
        page_parts.append(f"\n## {title}\n")
        for name in names:
            page_parts += _make_help_pages(f"rekindle {name}", commands.commands[name])
    return "".join(page_parts)


def _make_help_pages(path: str, command: Any) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            yield from _make_help_pages(f"{path} {name}", subcommand)
        return
    context = click.Context(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    yield f"\n### {path}\n\n```text\n{command.get_help(context)}\n```\n"


def api_page() -> str:
    """Return all public names with signature, docstring and fields, by module."""
    page_parts = [f"{API_HEAD}\n{_convert_docstring(project)}\n"]
    for module, names in vars(rekindle)["PUBLIC_NAMES"].items():
        page_parts.append(
            f"\n## {module}\n\n{_convert_docstring(import_module(f'rekindle.{module}'))}\n"
        )
        page_parts += [_make_entry(name, getattr(rekindle, name)) for name in names]
    page_parts.append(f"\n## blocks\n\n{_convert_docstring(blocks)}\n")
    page_parts += [_make_entry(f"blocks.{name}", getattr(blocks, name)) for name in blocks.__all__]
    page_parts.append(
        "\n## Further modules\n\nThe docstring of each module describes its functions.\n\n"
    )
    for module in FURTHER_MODULES:
        title = (import_module(f"rekindle.{module}").__doc__ or "").strip().splitlines()[0]
        page_parts.append(f"- `rekindle.{module}`: {title}\n")
    return "".join(page_parts)


def training_page() -> str:
    """Return docs/training.md with a row for each key of `train:` in its table."""
    rows = ["\n| key | values | default | meaning |\n| --- | --- | --- | --- |\n"]
    for key, values, default, description in describe_keys("train"):
        shown = "" if default is None else f"`{json.dumps(default)}`"
        rows.append(
            f"| `{key.removeprefix('train.')}` | {values.replace('|', 'or')} | {shown} |"
            f" {description} |\n"
        )
    return SETTINGS_TABLE.sub(lambda _: "".join([*rows, "\n"]), TRAINING.read_text())


def _make_entry(name: str, value: Any) -> str:
    annotations = getattr(value, "__metadata__", None)
    if annotations:  # the name refers to an annotated type, such as Artifact
        return f"\n### {name}\n\n{annotations[0].__doc__}\n"
    assert value.__doc__, f"{name} has no docstring"
    if inspect.isclass(value):
        members = "".join([*_make_field_rows(value), *_make_method_lines(value)])
    else:
        members = ""
    return (
        f"\n### {name}\n\n`{make_signature(name, value)}`\n\n{_convert_docstring(value)}\n{members}"
    )


def make_signature(name: str, value: Any) -> str:
    """Return `name(a, b=1)` of a function or a class to call, or `class name(bases)` of a class to
    inherit from."""
    if inspect.isclass(value) and (
        "__init__" not in vars(value) or getattr(value, "_is_protocol", False)
    ):
        # some of the public names are aliases
        names = {
            getattr(rekindle, public): public for public in vars(rekindle)["PUBLIC_NAMES"]["errors"]
        }
        return (
            f"class {name}({', '.join(names.get(base, base.__name__) for base in value.__bases__)})"
        )

    shown_parameters = []
    has_star = False

    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self":
            continue

        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            shown_parameters = [*shown_parameters, "*"]
            has_star = True

        default = parameter.default
        if default is parameter.empty:
            text = ""
        else:
            if "<" not in repr(default):
                text = f"={default!r}"
            else:
                text = "=..."

        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        shown_parameters.append(f"{stars}{parameter.name}{text}")

    return f"{name}({', '.join(shown_parameters)})"


def _make_field_rows(value: Any) -> Iterator[str]:
    """Yield a table row for each field that the model itself declares."""
    all_fields = getattr(value, "model_fields", {})

    fields = {
        name: field
        for name, field in all_fields.items()
        if name in vars(value).get("__annotations__", {})
    }
    if fields:
        yield "\n| field | default | meaning |\n| --- | --- | --- |\n"
        for name, field in fields.items():
            if field.default is PydanticUndefined:
                default = ""
            else:
                default = f"`{field.default!r}`"

            yield (
                f"| `{name}` | {default if len(default) < 40 else '...'} |"
                f" {field.description or ''} |\n"
            )


def _make_method_lines(value: Any) -> Iterator[str]:
    """Yield a line for each public method with a docstring."""
    methods = {
        name: method
        for name, method in vars(value).items()
        if name[0] != "_" and inspect.isfunction(method) and method.__doc__
    }
    if methods:
        yield "\n"
        for name, method in methods.items():
            first_paragraph = (inspect.getdoc(method) or "").partition("\n\n")[0]
            sentence = " ".join(first_paragraph.split())
            yield f"- `{make_signature(name, method)}`: {sentence}\n"


def _convert_docstring(value: Any) -> str:
    """Convert a docstring to Markdown, where indented lines are code."""
    text = inspect.getdoc(value) or ""
    return re.sub(
        r"((?:^    .*\n?(?:\n(?=    ))?)+)", _make_fenced_block, text + "\n", flags=re.MULTILINE
    ).rstrip()


def _make_fenced_block(code: re.Match[str]) -> str:
    return f"```text\n{textwrap.dedent(code[0]).rstrip()}\n```\n"


if __name__ == "__main__":
    COMMANDS.write_text(commands_page())
    API.write_text(api_page())
    TRAINING.write_text(training_page())
