"""Paths in the user's own sections mean the same file in every step, or are refused with a message
that says what to do."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.blocks.manifest.config import load_config, relative_paths
from rekindle.cli.sources import check_paths
from rekindle.errors import ConfigError

WORKLOAD = """
from pathlib import Path
from pydantic import BaseModel, DirectoryPath, Field, FilePath
from steps.digits import *
from rekindle import DataConfig, Section

class Tables(BaseModel):
    prices: Path | None = None
    others: list[Path] = []
    by_name: dict[str, Path] = {}
    files: list[FilePath] = []
    folder: DirectoryPath | None = None

class Data(DataConfig):
    source: str = "sklearn://digits"
    lookup: Path = Path("lookup.csv")
    tables: Tables = Tables()
    name: str = ""
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_paths_workload.py").write_text(WORKLOAD)
    (tmp_path / "lookup.csv").write_text("a,b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_paths_workload", raising=False)
    return tmp_path


def write(data: dict) -> str:
    values = {
        "name": "demo",
        "workload": "own_paths_workload",
        "data": data,
        "train": {"validation": 0.1},
    }
    Path("c.yaml").write_text(yaml.safe_dump(values))
    return "c.yaml"


def test_relative_paths_are_resolved_at_every_depth_also_defaults(folder: Path) -> None:
    tables = {"prices": "prices.csv", "others": ["a/b.csv", "/c.csv"], "by_name": {"x.y": "d.csv"}}
    data: Any = load_config(write({"tables": tables}), [], {}).config.data
    assert data.lookup == folder / "lookup.csv"
    assert data.tables.prices == folder / "prices.csv"
    assert data.tables.others == [folder / "a/b.csv", Path("/c.csv")]
    assert data.tables.by_name == {"x.y": folder / "d.csv"}


def test_a_path_in_a_config_of_another_project_is_relative_to_that_project(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").write_text("[tool.rekindle]\n")
    file = folder / write({"tables": {"prices": "prices.csv"}})
    current_folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(current_folder)
    data: Any = load_config(file, ["data.tables.others=[a.csv]"], {}).config.data
    assert data.tables.prices == folder / "prices.csv"
    assert data.lookup == folder / "lookup.csv"
    assert data.tables.others == [current_folder / "a.csv"], (
        "a value of the command line is relative to the working directory"
    )


def test_an_existing_file_or_folder_may_lie_in_another_project(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").write_text("[tool.rekindle]\n")
    file = folder / write({"tables": {"files": ["lookup.csv"], "folder": "."}})
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    data: Any = load_config(file, [], {}).config.data
    tables = data.tables
    assert tables.files == [folder / "lookup.csv"]
    assert tables.folder == folder
    with pytest.raises(
        ConfigError,
        match=r"data\.tables\.files\.0 is '.*/prices\.csv': Path does not point to a file",
    ):
        file.write_text(file.read_text().replace("lookup.csv", "prices.csv"))
        load_config(file, [], {})


def test_a_uri_in_a_path_is_refused_because_a_path_changes_it(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.lookup is a URI, but the field is a Path: declare it as `str`",
    ):
        load_config(write({"lookup": "s3://raw/lookup.csv"}), [], {})


def test_a_text_that_is_a_relative_path_of_a_file_is_a_warning_that_names_the_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(write({"name": "lookup.csv"}), [], {}).config
    assert list(relative_paths(config)) == [("data.name", "lookup.csv")]
    check_paths(config)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: data.name is 'lookup.csv'")
    assert "pathlib.Path" in line
    for harmless in ("lookup", str(folder / "lookup.csv"), "s3://a/lookup.csv", "x" * 5000):
        assert list(relative_paths(load_config(write({"name": harmless}), [], {}).config)) == []


def test_a_file_of_the_data_that_pods_cannot_access_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write({}), [], {}).config
    check_paths(config)
    monkeypatch.setenv("REKINDLE_PATH", str(folder / "elsewhere"))
    monkeypatch.chdir("/")
    monkeypatch.setattr("rekindle.workload.POD_PRIVATE", folder)
    with pytest.raises(ConfigError, match=r"data\.lookup is .*each pod has its own "):
        check_paths(config)
