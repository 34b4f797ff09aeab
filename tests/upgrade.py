"""Update the locked packages, for `make upgrade`.

python -m tests.upgrade lock                  all packages that pyproject.toml does not pin
python -m tests.upgrade lock torch==2.15.0    pins this version, and updates only what it needs
python -m tests.upgrade record                writes the table of docs/versions.md, with the date
"""

import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.commands import ROOT

PROJECT_FILE = "pyproject.toml"
PAGE = "docs/versions.md"
UV = ROOT / ".venv/bin/uv"
PACKAGE_TABLE = re.compile(r"(?<=<!-- packages: generated -->\n).*?(?=<!-- end -->)", re.DOTALL)
# the packages whose version a user sees, in bits of weights, in manifests or in records
PACKAGES = (
    *("torch", "numpy", "safetensors", "polars", "scikit-learn"),
    *("mlflow", "optuna", "hera", "kubernetes", "boto3", "pydantic"),
    *("transformers", "accelerate", "lightning"),
)


def pin_version(project_text: str, requirement: str) -> str:
    """Return the text of pyproject.toml with another version of a pinned package.

    `requirement`: NAME==VERSION. Raises SystemExit if the package is not pinned.
    """
    name, _, version = requirement.partition("==")
    pin = re.compile(rf'(?<="){re.escape(name)}==[^"]+')
    if not (version and pin.search(project_text)):
        pins = ", ".join(sorted(set(re.findall(r'"([a-z0-9-]+)==', project_text))))
        raise SystemExit(
            f"{requirement} must be NAME==VERSION, of a package that pyproject.toml pins: {pins}."
            " Without arguments, all other packages are updated."
        )
    return pin.sub(requirement, project_text)


def lock_requirements(requirements: Sequence[str], project: Path = ROOT) -> None:
    """Update uv.lock of a project, and the pins in pyproject.toml if `requirements` names
    packages. If uv finds no solution, leave both files unchanged. Raises SystemExit."""
    project_file = project / PROJECT_FILE
    old_text = project_file.read_text()
    new_text = old_text
    for requirement in requirements:
        new_text = pin_version(new_text, requirement)
    project_file.write_text(new_text)

    options = [] if requirements else ["--upgrade"]
    try:
        subprocess.run([UV, "lock", *options], cwd=project, check=True)
    except subprocess.CalledProcessError as error:
        project_file.write_text(old_text)
        raise SystemExit(f"uv.lock is unchanged: uv ended with code {error.returncode}.") from error


def package_table(date: str) -> str:
    """Return the table of docs/versions.md with the installed versions."""
    rows = [f"| {name} | {importlib.metadata.version(name)} | {date} |" for name in PACKAGES]
    python_row = f"| Python | {platform.python_version()} | {date} |"
    return "\n".join(
        ["| package | version | tried on |", "| --- | --- | --- |", python_row, *rows, ""]
    )


def record_versions(project: Path = ROOT) -> None:
    """Write the installed versions and today's date to docs/versions.md of a project."""
    today = datetime.now(UTC).date().isoformat()
    page = project / PAGE
    page.write_text(PACKAGE_TABLE.sub(package_table(today), page.read_text()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lock", *requirements]:
            lock_requirements(requirements)
        case ["record"]:
            record_versions()
        case _:
            raise SystemExit(__doc__)
