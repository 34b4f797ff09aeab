"""An installation of the wheel cannot take a version of a dependency with a vulnerability that was
known and fixed."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# package → first version without the known vulnerabilities that affect this project
FIRST_FIXED_VERSION = {
    "mlflow": "3.17.0",
    "pytest": "9.0.3",  # CVE-2025-71176
    "requests": "2.33.0",  # CVE-2026-25645
    "scikit-learn": "1.5.0",  # CVE-2024-5206
    "setuptools": "78.1.1",  # CVE-2025-47273
    "starlette": "1.0.1",  # CVE-2026-48710
    "torch": "2.6.0",  # CVE-2025-32434
    "urllib3": "2.7.0",  # CVE-2026-44432
}
PYPROJECT = tomllib.loads(Path("pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILD = PYPROJECT["build-system"]["requires"]
TEMPLATE = tomllib.loads(Path("template/pyproject.toml").read_text())["project"]
REQUIREMENTS_BY_GROUP = {
    "": PROJECT["dependencies"],
    "build": BUILD,
    **PROJECT["optional-dependencies"],
    "template": TEMPLATE["dependencies"],
    **{f"template {name}": texts for name, texts in TEMPLATE["optional-dependencies"].items()},
}


@pytest.mark.parametrize(("name", "fixed"), FIRST_FIXED_VERSION.items())
def test_no_group_of_dependencies_accepts_a_vulnerable_version(name: str, fixed: str) -> None:
    requirements = [Requirement(text) for group in REQUIREMENTS_BY_GROUP.values() for text in group]
    bounds = [
        Version(specifier.version)
        for requirement in requirements
        if requirement.name == name
        for specifier in requirement.specifier
        if specifier.operator in (">=", "==")
    ]

    assert bounds, f"{name} is not a dependency any more: remove it from FIXED"
    assert min(bounds) >= Version(fixed)
