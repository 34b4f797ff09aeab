"""A result is cached only if its key covers all code that the process of the step has loaded."""

import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import markupsafe._speedups
import pytest

from rekindle import project
from rekindle.cache.uncovered import read_uncovered_reasons
from rekindle.storage import Store

# this library is used as an extension module of the project, because it has no dependencies
LIBRARY = Path(markupsafe._speedups.__file__)
STEP = '''
"""Counts."""
from rekindle import Reuse, StepInputs, StepOutputs
REUSE = Reuse()

class Inputs(StepInputs):
    pass

class Outputs(StepOutputs):
    count: int

def run(inputs):
    import ctypes, importlib, runpy, sys
    from pathlib import Path
    HERE = Path(__file__).parent
    {code}
    return Outputs(count=1)
'''
COMPUTED_IMPORTS = {
    "a module with a computed name": ("hidden.py", "importlib.import_module('steps.hid' + 'den')"),
    "a module that is removed from the imported ones": (
        "hidden.py",
        "importlib.import_module('steps.hid' + 'den'); del sys.modules['steps.hidden']",
    ),
    "an extension with a computed name": (
        f"_speedups{EXTENSION_SUFFIXES[0]}",
        "__import__('steps._speed' + 'ups')",
    ),
    "a compiled module with a computed name": (
        "hidden.pyc",
        "importlib.import_module('steps.hid' + 'den')",
    ),
    "a module that is run": ("hidden.py", "runpy.run_module('steps.hidden')"),
    "a file that is run": ("hidden.txt", "runpy.run_path(str(HERE / 'hidden.txt'))"),
    "a library": ("hidden.so", "ctypes.CDLL(str(HERE / 'hidden.so'))"),
}
COMPUTED_IMPORTS.update(
    {
        "an archive": ("hidden.zip", "sys.path.insert(0, str(HERE / 'hidden.zip')); import packed"),
        "an archive that is run": ("hidden.zip", "runpy.run_path(str(HERE / 'hidden.zip'))"),
        "a compiled file that is run": ("hidden.pyc", "runpy.run_path(str(HERE / 'hidden.pyc'))"),
        "a compiled module that is removed from the imported ones": (
            "hidden.pyc",
            "importlib.import_module('steps.hid' + 'den'); del sys.modules['steps.hidden']",
        ),
        "a file that is run and then removed": (
            "hidden.txt",
            (
                "file = HERE / 'hidden.txt'; file.write_text(''); runpy.run_path(str(file));"
                " file.unlink()"
            ),
        ),
        "a file with the name of generated code": ("<hidden>", "runpy.run_path('steps/<hidden>')"),
    }
)
COVERED_IMPORTS = {
    "a module": ("other.py", "importlib.import_module(name='steps.other')"),
    "a relative name": ("other.py", "importlib.import_module('.other', package='steps')"),
    "an extension": (f"_speedups{EXTENSION_SUFFIXES[0]}", "from steps import _speedups"),
    "a compiled module": ("other.pyc", "from steps import other"),
    "a library of the system": ("other.txt", "ctypes.CDLL(None)"),
}


def make_step(folder: Path, file: str, code: str) -> None:
    """Write a step that loads the file `file` in its folder by the Python code `code`."""
    (folder / "steps").mkdir(parents=True)
    (folder / "steps/loading.py").write_text(STEP.format(code=code))
    make_code(folder / "steps" / file)


def make_code(file: Path, text: str = "VALUE = 1\n") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if ".so" in file.name or file.suffix == ".pyd":
        shutil.copy(LIBRARY, file)
    elif file.suffix == ".pyc":
        file.with_suffix(".py").write_text(text)
        py_compile.compile(str(file.with_suffix(".py")), cfile=str(file), doraise=True)
        file.with_suffix(".py").unlink()
    elif file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("__main__.py", text)
            archive.writestr("packed.py", text)
    else:
        file.write_text(text)


def run_step(folder: Path, environment: dict[str, str], task: str) -> str:
    """Run the step as the task of a run, and return its standard error."""
    variables = os.environ | environment | {project.PATH_VARIABLE: str(folder)}

    command = [
        sys.executable,
        "-P",
        "-m",
        "rekindle",
        "step",
        "steps.loading",
        f"--entry={task.replace('_', '-')}",
        "--reuse=yes",
    ]

    result = subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr

    return result.stderr


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("loaded", COMPUTED_IMPORTS)
def test_a_result_is_not_cached_if_its_key_does_not_cover_the_loaded_code(
    loaded: str, tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> None:
    file, code = COMPUTED_IMPORTS[loaded]
    make_step(tmp_path, file, code)
    said = run_step(tmp_path, s3_environment, f"{tmp_path.name}-1/loading")
    reason = f"steps/{file} was loaded, but the cache key does not cover it"
    assert reason in said
    run = f"{tmp_path.name}-1".replace("_", "-")
    assert reason in read_uncovered_reasons(s3, run, ["loading", "other"])["loading"]
    assert "cached:" not in run_step(tmp_path, s3_environment, f"{tmp_path.name}-2/loading")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("loaded", COVERED_IMPORTS)
def test_a_result_is_cached_if_its_key_covers_the_loaded_code(
    loaded: str, tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> None:
    file, code = COVERED_IMPORTS[loaded]
    make_step(tmp_path, file, f"{code}  # {tmp_path}")
    assert run_step(tmp_path, s3_environment, f"{tmp_path.name}-1/loading") == ""
    assert "cached: outputs of" in run_step(tmp_path, s3_environment, f"{tmp_path.name}-2/loading")


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_a_result_is_not_cached_if_python_does_not_compare_a_compiled_copy_with_its_source(
    mode: py_compile.PycInvalidationMode, tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> None:
    make_step(tmp_path, "other.py", f"from steps import other  # {tmp_path}")
    py_compile.compile(str(tmp_path / "steps/other.py"), invalidation_mode=mode)
    said = run_step(tmp_path, s3_environment, f"{tmp_path.name}-1/loading")
    is_unchecked = mode is py_compile.PycInvalidationMode.UNCHECKED_HASH
    assert ("was run without a comparison with its source" in said) == is_unchecked
    second_result = run_step(tmp_path, s3_environment, f"{tmp_path.name}-2/loading")
    assert ("cached: outputs of" in second_result) != is_unchecked


@pytest.mark.slow
def test_a_library_that_is_a_file_of_a_package_is_covered_also_in_a_linked_folder(
    tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> None:
    package = tmp_path / "project/steps/loading"
    package.mkdir(parents=True)
    make_code(tmp_path / "libraries/hidden.so")
    (package / "linked").symlink_to(tmp_path / "libraries")
    code = f"ctypes.CDLL(str(HERE / 'linked/hidden.so'))  # {tmp_path}"
    (package / "__init__.py").write_text(STEP.format(code=code))

    assert run_step(tmp_path / "project", s3_environment, f"{tmp_path.name}-1/loading") == ""
    second_result = run_step(tmp_path / "project", s3_environment, f"{tmp_path.name}-2/loading")
    assert "cached: outputs of" in second_result

    with (tmp_path / "libraries/hidden.so").open("ab") as library:
        library.write(b"rebuilt")

    assert run_step(tmp_path / "project", s3_environment, f"{tmp_path.name}-3/loading") == ""


@pytest.mark.slow
def test_a_result_is_not_cached_if_a_hook_of_the_start_of_python_has_loaded_own_code(
    tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> None:
    make_step(tmp_path, "unused.py", f"sys.modules['sitecustomize'].VALUE  # {tmp_path}")
    make_code(tmp_path / "hooks/sitecustomize.py")
    environment = s3_environment | {"PYTHONPATH": str(tmp_path / "hooks")}
    said = run_step(tmp_path, environment, f"{tmp_path.name}-1/loading")
    assert "hooks/sitecustomize.py was loaded, but the cache key does not cover it" in said


@pytest.mark.slow
def test_generated_code_and_a_removed_working_directory_do_not_prevent_reuse(
    tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> None:
    code = "import os; Path('here').mkdir(); os.chdir('here'); os.rmdir('../here'); "
    code += f"exec(compile('1', 'generated', 'exec'))  # {tmp_path}"
    make_step(tmp_path, "unused.py", code)
    assert run_step(tmp_path, s3_environment, f"{tmp_path.name}-1/loading") == ""
    assert "cached: outputs of" in run_step(tmp_path, s3_environment, f"{tmp_path.name}-2/loading")
