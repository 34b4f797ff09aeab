"""`make upgrade` locks newer packages, keeps pinned packages, and records the tested versions."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.upgrade import PACKAGES, PAGE, UV, lock_requirements, pin_version, record_versions

PROJECT = """\
[project]
name = "demo"
version = "0"
requires-python = ">=3.11"
dependencies = ["loose>=1", "pinned==1.0"]

[project.optional-dependencies]
extra = ["pinned==1.0"]

[[tool.uv.index]]
name = "local"
url = "index"
format = "flat"
default = true
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A locked project whose packages come from a folder, which contains version 1.0 of each."""
    if not UV.exists():
        pytest.skip("uv is not installed in .venv")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for name in ("loose", "pinned"):
        publish_package(tmp_path, name, "1.0")
    lock_requirements([], tmp_path)
    assert read_locked(tmp_path) == {"loose": "1.0", "pinned": "1.0"}
    return tmp_path


def publish_package(project: Path, name: str, version: str) -> None:
    """Write the wheel of an empty package to the index of the project."""
    (project / "index").mkdir(exist_ok=True)
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(project / f"index/{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{information}/RECORD", "")


def read_locked(project: Path) -> dict[str, str]:
    """Return the versions in uv.lock by the name of the package."""
    lock_file = tomllib.loads((project / "uv.lock").read_text())
    return {
        package["name"]: package["version"]
        for package in lock_file["package"]
        if package["name"] != "demo"
    }


def test_the_newest_version_is_locked_of_packages_without_a_pin(project: Path) -> None:
    for name in ("loose", "pinned"):
        publish_package(project, name, "2.0")
    lock_requirements([], project)
    assert read_locked(project) == {"loose": "2.0", "pinned": "1.0"}
    assert (project / "pyproject.toml").read_text() == PROJECT


def test_a_pinned_package_is_updated_alone_and_in_every_place_of_its_pin(project: Path) -> None:
    for name in ("loose", "pinned"):
        publish_package(project, name, "2.0")
    lock_requirements(["pinned==2.0"], project)
    assert read_locked(project) == {"loose": "1.0", "pinned": "2.0"}
    assert (project / "pyproject.toml").read_text().count("pinned==2.0") == 2


def test_a_version_that_does_not_exist_changes_no_file(project: Path) -> None:
    with pytest.raises(SystemExit, match=r"uv\.lock is unchanged"):
        lock_requirements(["pinned==3.0"], project)
    assert (project / "pyproject.toml").read_text() == PROJECT
    assert read_locked(project) == {"loose": "1.0", "pinned": "1.0"}


@pytest.mark.parametrize("requirement", ["torch", "torch==", "pydantic==9.0", "tor==1.0"])
def test_only_the_version_of_a_pinned_package_can_be_chosen(requirement: str) -> None:
    project_text = (ROOT / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match=r"of a package that pyproject\.toml pins: .*torch"):
        pin_version(project_text, requirement)


def test_the_installed_versions_are_recorded_with_the_date(tmp_path: Path) -> None:
    page = tmp_path / PAGE
    page.parent.mkdir()
    shutil.copy(ROOT / PAGE, page)
    text = page.read_text()
    outdated = re.sub(r"^\| torch \|.*$", "| torch | 0.1 | 2000-01-01 |", text, flags=re.MULTILINE)
    assert outdated != text
    page.write_text(outdated)

    record_versions(tmp_path)
    rows = {
        name: (tested_version, tested_on)
        for name, tested_version, tested_on in re.findall(
            r"^\| (\S+) \| (\S+) \| (\d{4}-\d\d-\d\d) \|$", page.read_text(), re.MULTILINE
        )
    }
    assert rows.keys() == {"Python", *PACKAGES}
    for name in PACKAGES:
        assert rows[name][0] == version(name)
        date.fromisoformat(rows[name][1])
    begin, end = "<!-- packages: generated -->", "<!-- end -->"
    recorded = page.read_text()
    assert recorded.partition(begin)[0] == text.partition(begin)[0]
    assert recorded.partition(end)[2] == text.partition(end)[2], "the rest is written by hand"


def test_versions_are_recorded_only_after_all_checks() -> None:
    make = ["make", "--no-print-directory", "-n", "upgrade", "PACKAGES=torch==9.0"]
    commands = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = [
        "tests.upgrade lock torch==9.0",
        "tests.docs.pages",
        "REGENERATE=1",
        "pyright",
        "pytest -n",
        "tests.upgrade record",
    ]
    positions = [commands.index(step) for step in steps]
    assert positions == sorted(positions)
