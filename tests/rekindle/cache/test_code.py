"""The identity of a step's code: every file that it may run, and no other."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import project
from rekindle.cache import code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(project.PATH, str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """A process keeps the code that it has; this makes it another one."""
    for remembered in (code._digest, code._sha256, code._imports):
        remembered.cache_clear()


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_all_that_is_imported_anywhere_counts_with_the_packages_that_hold_it(folder: Path) -> None:
    texts = {
        "first": "import second\nfrom parts.inner import third, value\n",
        "second": "def f():\n    import late\n",
        "late": "import json, numpy\nNAME = 'rekindle.keys'\nOTHER = 'other'\n",
    }
    empty = ("other", "parts/__init__", "parts/inner/__init__", "parts/inner/third", "parts/apart")
    write(folder, texts | dict.fromkeys(empty, ""))
    found = code.closure(["first"], [str(folder)])
    ours = {name: path.relative_to(folder).as_posix() for name, path in found.items() if folder in path.parents}
    assert ours == {
        "first": "first.py",
        "second": "second.py",
        "late": "late.py",
        "parts": "parts/__init__.py",
        "parts.inner": "parts/inner/__init__.py",
        "parts.inner.third": "parts/inner/third.py",
    }
    assert {"rekindle", "rekindle.keys"} <= found.keys(), "a module that is loaded by its name"
    assert not {"json", "numpy", "rekindle.storage"} & found.keys(), "what is installed counts by its version"


def test_a_package_that_is_a_workload_counts_with_all_its_files(folder: Path) -> None:
    write(folder, {"work/__init__": "import helper\n", "work/model": "", "work/deep/part": "", "helper": ""})
    (folder / "work/words.txt").write_text("a")
    (folder / "work/model.pyc").write_text("compiled")
    found = code.closure(["work"], [str(folder)])
    names = {name for name, path in found.items() if folder in path.parents}
    assert names == {"work", "helper", "work/__init__.py", "work/model.py", "work/deep/part.py", "work/words.txt"}
    assert found["work/words.txt"] == folder / "work/words.txt"


def test_the_first_folder_of_the_search_path_counts_and_a_package_before_a_module(tmp_path: Path) -> None:
    for place in ("one", "two"):
        write(tmp_path / place, {"same": f"NAME = '{place}'\n"})
    write(tmp_path / "two", {"same/__init__": "", "only": "this is no Python ("})
    found = code.closure(["same", "only"], [str(tmp_path / "one"), str(tmp_path / "two")])
    assert found == {"same": tmp_path / "one/same.py", "only": tmp_path / "two/only.py"}
    found = code.closure(["same"], [str(tmp_path / "two")])
    assert found["same"] == tmp_path / "two/same/__init__.py"


def test_code_is_the_same_however_it_is_asked_for_and_another_after_a_change(folder: Path) -> None:
    write(folder, {"first": "import second\n", "second": ""})
    before = code.here(["first", "second"])
    assert before == code.here(["second", "first", "first"]) and len(before) == 64
    assert before == code.here(["first"]), "which imports the other"
    write(folder, {"second": "VALUE = 1\n"})
    forget()
    assert code.here(["first", "second"]) != before


def test_another_python_or_package_is_other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"first": ""})
    before = code.here(["first"])
    monkeypatch.setattr(code, "packages", lambda: ["torch-1"])
    forget()
    assert (other := code.here(["first"])) != before
    monkeypatch.setattr(sys, "version", "4")
    forget()
    assert code.here(["first"]) not in (before, other)
    monkeypatch.undo()
    assert any(name.startswith("pydantic-") for name in code.packages()) and code.packages() == sorted(code.packages())


def test_in_a_pod_the_digest_of_the_image_stands_for_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"first": ""})
    image = "registry.example.com/rekindle@sha256:" + "ab" * 32
    assert (code.of_image(image), code.of_image("rekindle:1")) == ("sha256:" + "ab" * 32, "")
    monkeypatch.setenv(code.IMAGE, image)
    ours = code.here(["first"])
    assert ours != code.of_image(image), "here it is only a name"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert code.here(["first"]) == code.of_image(image)
    monkeypatch.setenv(code.IMAGE, "rekindle:1")
    assert code.here(["first"]) == ours
