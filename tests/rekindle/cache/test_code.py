"""The identity of a step's code covers every file that the step may run, and no other file."""

import hashlib
import itertools
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from rekindle import project
from rekindle.cache import code
from rekindle.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Clear the hashes that this process keeps, so that it behaves like a new process."""
    for remembered in (
        code._compute_digest,
        code._hash_file,
        code._list_imports,
        code._source_roots,
    ):
        remembered.cache_clear()


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_modules_imported_at_any_depth_and_their_parent_packages_belong_to_the_code(
    folder: Path,
) -> None:
    texts = {
        "first": "import second\nfrom parts.inner import third, value\n",
        "second": "def f():\n    import late\n",
        "late": "import json, numpy\nNAME = 'rekindle.keys'\nOTHER = 'other'\n",
    }

    empty = ("other", "parts/__init__", "parts/inner/__init__", "parts/inner/third", "parts/apart")
    write(folder, texts | dict.fromkeys(empty, ""))
    imported_files = code.imported_files(["first"], [str(folder)])

    in_project = {
        name: path.relative_to(folder).as_posix()
        for name, path in imported_files.items()
        if folder in path.parents
    }

    assert in_project == {
        "first": "first.py",
        "second": "second.py",
        "late": "late.py",
        "parts": "parts/__init__.py",
        "parts.inner": "parts/inner/__init__.py",
        "parts.inner.third": "parts/inner/third.py",
    }

    assert {"rekindle", "rekindle.keys"} <= imported_files.keys(), "a module that is loaded by name"
    assert not {"json", "numpy", "rekindle.storage"} & imported_files.keys(), (
        "installed packages count by version"
    )


def test_relative_imports_and_modules_loaded_by_name_belong_to_the_code(folder: Path) -> None:
    texts = {
        "parts/first": "from . import second\nfrom .third import value\nfrom ... import outside\n",
        "parts/second": "import importlib\nimportlib.import_module('parts.fourth')\n",
        "work/__init__": "from .model import *\n",
        "work/model": "from .deep.part import x\nfrom . import other\n",
        "work/deep/part": "from ..other import y\nfrom ...work import z\nimport helper\n",
    }

    empty = (
        "parts/third",
        "parts/fourth",
        "parts/fifth",
        "work/other",
        "helper",
        "second",
        "third",
    )

    write(folder, texts | dict.fromkeys(empty, ""))
    imported_files = code.imported_files(["parts.first"], [str(folder)])
    assert imported_files.keys() == {"parts.first", "parts.second", "parts.third", "parts.fourth"}
    assert code.imported_files(["work"], [str(folder)])["helper"] == folder / "helper.py"


def test_an_editable_installation_belongs_to_the_code_but_no_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = tmp_path / "src"
    installed = tmp_path / "base/dist-packages"
    write(editable, {"editable_models/net": "from . import layers\n", "editable_models/layers": ""})
    write(editable, {"editable_single": "", "editable_models/__init__": ""})
    write(installed, {"installed_models": "", "installed_package/__init__": ""})
    (installed / "installed_models-1.2.dist-info").mkdir()
    (installed / "debian_models-3.4.egg-info").touch()
    (installed / "old_models-5.6-py3.11.egg").touch()
    write(
        tmp_path / "project",
        {"first": "import editable_models.net, editable_single\nimport installed_models\n"},
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(editable), str(installed)])
    forget()
    imported_files = code.imported_files(
        ["first", "installed_package"], [str(tmp_path / "project")]
    )

    assert imported_files == {
        "first": tmp_path / "project/first.py",
        "editable_models": editable / "editable_models/__init__.py",
        "editable_models.net": editable / "editable_models/net.py",
        "editable_models.layers": editable / "editable_models/layers.py",
        "editable_single": editable / "editable_single.py",
    }

    names = {"installed_models-1.2", "debian_models-3.4", "old_models-5.6-py3.11"}
    assert names <= set(code.list_packages()), (
        "a virtual environment with the packages of the system"
    )


@pytest.mark.parametrize("first_folder", ["editable", "project"])
def test_of_a_module_in_two_places_the_one_that_python_imports_belongs_to_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_folder: str
) -> None:
    for name in ("editable", "project"):
        write(tmp_path / name, {"twice_found": ""})
    write(tmp_path / "project", {"first": "import twice_found\n"})
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path / "project"))
    # a process whose PYTHONPATH contains the project has the project in sys.path
    folders = ["editable"] if first_folder == "editable" else ["project", "editable"]
    monkeypatch.setattr(sys, "path", [*sys.path, *(str(tmp_path / name) for name in folders)])
    forget()

    imported_files = code.imported_files(["first"], [str(tmp_path / "project")])
    module = project.load_module("twice_found", "workload", [])
    sys.modules.pop("twice_found")
    assert module.__file__ == str(tmp_path / first_folder / "twice_found.py")
    assert imported_files["twice_found"] == tmp_path / first_folder / "twice_found.py"


# all ways in which a folder can contain a package; the submodule `net` is imported
FORMS = {
    "missing": [],
    "module": ["{}"],
    "namespace": ["{}/net"],
    "empty namespace": ["{}/other"],
    "package": ["{}/__init__", "{}/net"],
    "package without the submodule": ["{}/__init__"],
}


FEW_FORMS = ["missing", "namespace", "package"]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("depth", "order", "forms"),
    [
        ("", ["a", "b"], FEW_FORMS),
        ("outer.", ["a", "project", "b"], FEW_FORMS),
        *itertools.product(["", "outer."], [["a", "b"], ["a", "project", "b"]], [list(FORMS)]),
    ],
)
def test_the_file_of_a_submodule_is_the_one_that_python_imports_in_every_layout(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    depth: str,
    order: list[str],
    forms: list[str],
) -> None:
    layouts = list(itertools.product(forms, repeat=3))
    names = {layout: f"{depth}layout_{number}" for number, layout in enumerate(layouts)}
    for layout, name in names.items():
        for folder, form in zip(("a", "b", "project"), layout, strict=True):
            files = [file.format(name.replace(".", "/")) for file in FORMS[form]]
            write(tmp_path / folder, dict.fromkeys(files, ""))
    statements = "".join(f"import {name}.net\n" for name in names.values())
    write(tmp_path / "project", {"first": statements})

    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path / "project"))
    monkeypatch.setattr(sys, "path", [*sys.path, *(str(tmp_path / folder) for folder in order)])
    forget()
    imported_files = code.imported_files(["first"], [str(tmp_path / "project")])

    for layout, name in names.items():
        try:
            module = project.load_module(f"{name}.net", "workload", [])
        except ConfigError:
            assert f"{name}.net" not in imported_files, layout
        else:
            assert str(imported_files.get(f"{name}.net")) == module.__file__, layout

    for name in [name for name in sys.modules if name.startswith(("layout_", "outer"))]:
        del sys.modules[name]


def test_an_import_hook_of_an_editable_installation_is_asked_after_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hook(MetaPathFinder):
        def find_spec(
            self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            if name in ("hooked_module", "hooked_package"):
                return PathFinder.find_spec(name, [str(tmp_path / "editable")])
            return None

    write(tmp_path / "editable", dict.fromkeys(["hooked_module", "hooked_package/net"], ""))
    write(tmp_path / "editable", {"hooked_package/__init__": ""})
    write(tmp_path / "project", {"first": "import hooked_module, hooked_package.net\n"})
    (tmp_path / "project/hooked_package").mkdir()
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path / "project"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook()])
    forget()
    imported_files = code.imported_files(["first"], [str(tmp_path / "project")])
    assert imported_files["hooked_module"] == tmp_path / "editable/hooked_module.py"
    # the folder of the project hides the installed package
    with pytest.raises(ConfigError):
        project.load_module("hooked_package.net", "workload", [])
    del sys.modules["hooked_package"]
    assert "hooked_package.net" not in imported_files


def test_a_package_that_extends_its_path_has_the_submodules_of_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extends = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
    for folder in ("a", "project"):
        write(tmp_path / folder, {"extended/__init__": extends, f"extended/{folder}": ""})
    write(tmp_path / "project", {"first": "import extended.a, extended.project\n"})
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path / "project"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "a")])
    forget()
    imported_files = code.imported_files(["first"], [str(tmp_path / "project")])
    for name in ("extended.a", "extended.project"):
        assert str(imported_files[name]) == project.load_module(name, "workload", []).__file__
    for name in ("extended", "extended.a", "extended.project"):
        del sys.modules[name]


def test_of_a_wheel_in_site_packages_only_the_own_packages_belong_to_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = tmp_path / "site-packages"
    write(
        libraries,
        {"rekindle/keys": "import other_library\n", "rekindle/__init__": "", "other_library": ""},
    )
    write(tmp_path / "project", {"first": "import rekindle.keys, other_library\n"})
    monkeypatch.setattr(code, "ENGINE_FOLDERS", (libraries / "rekindle", libraries / "argolocal"))
    monkeypatch.setattr(project, "REFERENCE", libraries / "rekindle/reference")
    imported_files = code.imported_files(["first"], [str(tmp_path / "project")])
    assert imported_files.keys() == {"first", "rekindle", "rekindle.keys"}


def test_all_files_of_a_workload_that_is_a_package_belong_to_the_code(folder: Path) -> None:
    write(
        folder,
        {"work/__init__": "import helper\n", "work/model": "", "work/deep/part": "", "helper": ""},
    )
    (folder / "work/words.txt").write_text("a")
    (folder / "work/model.pyc").write_text("compiled")
    imported_files = code.imported_files(["work"], [str(folder)])
    names = {name for name, path in imported_files.items() if folder in path.parents}

    assert names == {
        "work",
        "helper",
        "work/__init__.py",
        "work/model.py",
        "work/deep/part.py",
        "work/words.txt",
    }

    assert imported_files["work/words.txt"] == folder / "work/words.txt"


@pytest.mark.parametrize(
    ("statement", "file"),
    [
        ("import parts.fast", f"parts/fast{EXTENSION_SUFFIXES[0]}"),
        ("import parts.fast", f"parts/fast{EXTENSION_SUFFIXES[-1]}"),
        ("import parts.fast", "parts/fast.pyc"),
        ("import parts.fast", f"parts/fast/__init__{EXTENSION_SUFFIXES[0]}"),
        ("import linked.fast", "elsewhere/fast.py"),
        ("import_module(name='parts.fast')", "parts/fast.py"),
        ("import_module(package='parts', name='.fast')", "parts/fast.py"),
        ("import_module('.fast', 'parts')", "parts/fast.py"),
        ("__import__(name='parts.fast')", "parts/fast.py"),
        ("__import__('parts', fromlist=['fast'])", "parts/fast.py"),
        ("__import__('parts', {}, {}, ('fast',))", "parts/fast.py"),
        ("builtins.__import__('parts.fast')", "parts/fast.py"),
        ("importlib.__import__('parts.fast')", "parts/fast.py"),
        ("import_module(**{'name': 'parts.fast'})", "parts/fast.py"),
        ("import parts.without_file", "parts/__init__.py"),
        ("from parts.without_file import value", "parts/__init__.py"),
    ],
)
def test_a_changed_file_changes_the_identity_of_the_code_that_imports_it(
    statement: str, file: str, folder: Path
) -> None:
    write(folder, {"first": statement})
    (folder / file).parent.mkdir(parents=True)
    (folder / "linked").symlink_to(folder / "elsewhere")
    (folder / file).write_bytes(b"built")
    original = code.code_identity(["first"])

    (folder / file).write_bytes(b"built anew")
    forget()
    assert code.code_identity(["first"]) != original


def test_all_files_of_a_package_include_linked_folders_extensions_and_compiled_modules_without_source(
    folder: Path,
) -> None:
    write(folder, {"work/__init__": "", "work/model": "", "elsewhere/deep/part": ""})
    for file in (
        "work/fast.so",
        "work/only.pyc",
        "work/model.pyc",
        "work/__pycache__/model.cpython.pyc",
    ):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"compiled")

    (folder / "work/linked").symlink_to(folder / "elsewhere")
    (folder / "elsewhere/loop").symlink_to(folder / "elsewhere")
    (folder / "elsewhere/up").symlink_to(folder / "work")

    names = {
        name for name in code.imported_files(["work"], [str(folder)]) if name.startswith("work/")
    }
    files = ("__init__.py", "model.py", "fast.so", "only.pyc", "linked/deep/part.py")
    assert names == {f"work/{file}" for file in files}


def test_an_extension_is_found_before_a_source_and_a_source_before_a_compiled_module(
    folder: Path,
) -> None:
    write(folder, {"first": "import both, source", "both": "", "source": ""})
    extension = folder / f"both{EXTENSION_SUFFIXES[0]}"
    for file in (extension, folder / "source.pyc"):
        file.write_bytes(b"compiled")
    imported_files = code.imported_files(["first"], [str(folder)])
    assert imported_files == {
        "first": folder / "first.py",
        "both": extension,
        "source": folder / "source.py",
    }


def test_modules_are_resolved_in_the_order_of_the_search_path_and_packages_first(
    tmp_path: Path,
) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, {"same": f"NAME = '{name}'\n"})
    write(tmp_path / "two", {"same/__init__": "", "only": "this is no Python ("})
    imported_files = code.imported_files(
        ["same", "only"], [str(tmp_path / "one"), str(tmp_path / "two")]
    )
    assert imported_files == {"same": tmp_path / "one/same.py", "only": tmp_path / "two/only.py"}
    imported_files = code.imported_files(["same"], [str(tmp_path / "two")])
    assert imported_files["same"] == tmp_path / "two/same/__init__.py"


def test_the_identity_of_code_changes_only_with_the_code(folder: Path) -> None:
    write(folder, {"first": "import second\n", "second": ""})
    original = code.code_identity(["first", "second"])
    assert original == code.code_identity(["second", "first", "first"])
    assert len(original) == 64
    assert original == code.code_identity(["first"]), "first imports second"
    write(folder, {"second": "VALUE = 1\n"})
    forget()
    assert code.code_identity(["first", "second"]) != original


def test_the_identity_of_code_depends_on_python_and_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, {"first": ""})
    original = code.code_identity(["first"])
    monkeypatch.setattr(code, "list_packages", lambda: ["torch-1"])
    forget()
    other = code.code_identity(["first"])
    assert other != original
    monkeypatch.setattr(sys, "version", "4")
    forget()
    assert code.code_identity(["first"]) not in (original, other)
    monkeypatch.undo()
    assert any(name.startswith("pydantic-") for name in code.list_packages())
    assert code.list_packages() == sorted(code.list_packages())


def test_in_a_pod_the_digest_of_the_image_is_the_identity_of_the_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, {"first": ""})
    image = "registry.example.com/rekindle@sha256:" + "ab" * 32
    assert code.image_digest(image) == "sha256:" + "ab" * 32
    assert code.image_digest("rekindle:1") == ""
    monkeypatch.setenv(code.REKINDLE_IMAGE, image)
    local = code.code_identity(["first"])
    assert local != code.image_digest(image), "outside a pod the image is ignored"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert code.code_identity(["first"]) == code.image_digest(image)
    monkeypatch.setenv(code.REKINDLE_IMAGE, "rekindle:1")
    assert code.code_identity(["first"]) == local


def test_a_source_that_python_cannot_parse_is_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import deep\n")
    for source in ("x = " + "+".join(["1"] * 100_000), "x = " + "-" * 200_000 + "1"):
        (tmp_path / "deep.py").write_text(source)
        code._list_imports.cache_clear()
        assert code.imported_files(["own"], [str(tmp_path)]).keys() == {"own", "deep"}


def test_a_large_file_is_not_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as out:
        out.truncate(64 << 20)
    tracemalloc.start()
    digest = code._hash_file(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert digest == hashlib.sha256(bytes(64 << 20)).hexdigest()
    assert peak < 16 << 20
