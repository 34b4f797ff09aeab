"""The project that a command uses is the project of the working directory or else the reference
project, but never both."""

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest
import yaml

from rekindle import project
from rekindle.errors import ConfigError
from rekindle.project.template import create
from rekindle.storage import Store
from tests.commands import BIN, ROOT
from tests.ports import free_port

PIPELINE = '''
"""One step, which only this project has."""

from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        blocks.step("steps.greet", name=config.model.name)
    return workflow
'''
STEP = '''
"""Greet somebody."""

from pydantic import Field

from rekindle.step import StepInputs, StepOutputs


class Inputs(StepInputs):
    name: str = Field(description="whom to greet")


class Outputs(StepOutputs):
    greeting: str = Field(description="the greeting")


def run(inputs):
    return Outputs(greeting=f"hello {inputs.name}")
'''
WORKLOAD = """
from rekindle.sections import Section
from rekindle.workload import DataConfig as Data


class Model(Section):
    name: str = "world"


from rekindle import Metric
metrics = (Metric("loss", max),)
prepare = dataset = model = loss = examples = predictor = None
"""
CONFIG = '{name: hello, workload: steps.greeting, data: {source: "made://up"}, model: {name: Ada}}'


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new environment with the test environment's dependencies, and return
    the bin folder of the environment."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = [str(BIN / "uv"), "--quiet"]
    subprocess.run([*uv, "build", "--wheel", "--out-dir", folder, ROOT], check=True)
    subprocess.run([*uv, "venv", "--python", sys.executable, folder / "venv"], check=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "venv"
    subprocess.run(
        [*uv, "pip", "install", "--no-deps", "--python", environment / "bin/python", wheel],
        check=True,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    # .pth files are not read recursively, so the editable installation is not on the path
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    location = call(environment / "bin/python", "-c print(__import__('rekindle').__file__)", folder)
    assert Path(location).is_relative_to(environment)

    return environment / "bin"


def call(program: Path, arguments: str, folder: Path, **settings: str) -> str:
    """Run `program` in `folder`, without the settings of the test session, and return its stdout;
    the program must succeed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REKINDLE_", "PYTHON"))
    }

    result = subprocess.run(
        [program, *arguments.split()],
        cwd=folder,
        env=environment | settings,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stdout + result.stderr

    return result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("config configs/demo.yaml", "steps.fraud"),
        (f"lint --manifest {ROOT}/tests/golden/workflow.yaml", ""),
        pytest.param("lint configs/demo.yaml", "", marks=pytest.mark.slow),
        pytest.param("render configs/cluster.yaml", "kind: Workflow", marks=pytest.mark.slow),
        pytest.param(
            *("render configs/handbook.yaml --kind cron", "kind: CronWorkflow"),
            marks=pytest.mark.slow,
        ),
        ("platform render --with minio --with mlflow", "python"),
        ("step steps.prepare --help", "rekindle step steps.prepare"),
        pytest.param(
            *("demo chaos --workers 1 --steps 20 --seconds-between 100", "EQUAL"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_installed_wheel_works_in_an_empty_folder(
    installed: Path, tmp_path: Path, arguments: str, expected: str
) -> None:
    assert expected in call(installed / "rekindle", arguments, tmp_path)


def write_project(folder: Path, packages: bool) -> Path:
    """Write a project with its own `steps` and `pipelines`, with or without __init__.py."""
    files = {
        "pipelines/training.py": PIPELINE,
        "steps/greet.py": STEP,
        "steps/greeting.py": WORKLOAD,
        "configs/hello.yaml": CONFIG,
    }

    files.update({"pipelines/__init__.py": "", "steps/__init__.py": ""} if packages else {})

    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    (folder / "notebooks").mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("packages", [True, False])
def test_a_folder_with_steps_and_pipelines_is_the_project(
    installed: Path, tmp_path: Path, packages: bool, s3: Store, mlflow_server: str
) -> None:
    folder = write_project(tmp_path, packages)
    rekindle = installed / "rekindle"
    subfolder = folder / "notebooks"
    manifest = yaml.safe_load(call(rekindle, "render configs/hello.yaml", subfolder))
    assert {template["name"] for template in manifest["spec"]["templates"]} == {"greet", "main"}
    assert "steps.greeting" in call(rekindle, "config configs/hello.yaml", folder)
    call(rekindle, "lint configs/hello.yaml", folder)
    call(rekindle, "step steps.greet --name=Bob --output greeting=greeting", subfolder)
    assert (subfolder / "greeting").read_text() == "hello Bob"
    assert "greet succeeded" in call(rekindle, "run configs/hello.yaml", subfolder)


def test_an_image_needs_only_the_steps(installed: Path, tmp_path: Path) -> None:
    folder = write_project(tmp_path / "app", packages=False)
    (folder / "pipelines/training.py").unlink()
    paths = {"PYTHONPATH": str(folder), "REKINDLE_PATH": str(folder)}
    step = "-m rekindle step steps.greet --name=Bob --output greeting=greeting"
    call(installed / "python", step, tmp_path, **paths)
    assert (tmp_path / "greeting").read_text() == "hello Bob"


def test_the_project_is_the_nearest_folder_with_pipelines_or_settings(tmp_path: Path) -> None:
    assert project.find_project_root(tmp_path) == project.REFERENCE
    (tmp_path / "pipelines").mkdir()
    # `pipelines` without a module does not count
    assert project.find_project_root(tmp_path) == project.REFERENCE
    (tmp_path / "pyproject.toml").write_text("[tool.rekindle]\n")
    inner_project = tmp_path / "team" / "project"
    (inner_project / "pipelines").mkdir(parents=True)
    (inner_project / "pipelines" / "nightly.py").touch()
    assert project.find_project_root(tmp_path / "team") == tmp_path
    assert project.find_project_root(inner_project / "pipelines") == inner_project


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("planted", ["pipelines/training.py", "pyproject.toml"])
def test_files_of_another_user_do_not_make_a_project(tmp_path: Path, planted: str):
    own_folder = tmp_path / "mine"
    own_folder.mkdir()
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    (tmp_path / planted).write_text("[tool.rekindle]\n")
    assert project.find_project_root(own_folder) == tmp_path
    for path in (tmp_path / planted, (tmp_path / planted).parent):
        os.chown(path, 65534, -1)
    os.chown(tmp_path, 0, -1)
    assert project.find_project_root(own_folder) == project.REFERENCE
    # the working directory belongs to another user
    os.chown(own_folder, 65534, -1)
    assert project.find_project_root(own_folder) == tmp_path


@pytest.mark.parametrize("kind", ["a device", "a pipe", "a large file", "a deeply nested file"])
def test_a_pyproject_file_that_cannot_be_read_does_not_make_a_project(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "pyproject.toml"
    if kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a large file":
        file.write_text("[tool.rekindle]\n")
        os.truncate(file, 1 << 40)
    else:
        file.write_text(f"[tool.rekindle]\nkey = {'[' * 10_000}")

    program = (
        "from pathlib import Path; from rekindle import project;"
        f" print(project.find_project_root(Path({str(tmp_path)!r})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert result.stdout.strip() == str(project.REFERENCE), result.stderr


def test_a_config_is_found_from_a_subfolder_and_the_nearest_config_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(project.PATH_VARIABLE, raising=False)
    folder = write_project(tmp_path, packages=False)
    monkeypatch.chdir(folder / "notebooks")
    assert project.find_config_file(Path("configs/hello.yaml")) == folder / "configs/hello.yaml"
    (folder / "notebooks/configs").mkdir()
    (folder / "notebooks/configs/hello.yaml").touch()
    assert project.find_config_file(Path("configs/hello.yaml")) == Path("configs/hello.yaml")
    # the file is not the config of the reference project
    assert project.find_config_file(Path("configs/demo.yaml")) == Path("configs/demo.yaml")


@pytest.mark.slow
def test_a_config_of_another_project_uses_that_project_and_its_data(tmp_path: Path) -> None:
    current_project = write_project(tmp_path / "here", packages=False)
    other = write_project(tmp_path / "other", packages=False)
    (other / "steps/greeting.py").write_text(
        WORKLOAD.replace('"world"', '"world"\n    mood: str = "cheerful"')
    )

    for folder in (current_project, other):
        (folder / "rows.csv").touch()
        (folder / "configs/hello.yaml").write_text(CONFIG.replace("made://up", "rows.csv"))

    for start, file in (
        (current_project, "../other/configs/hello.yaml"),
        (tmp_path, "other/configs/hello.yaml"),
    ):
        text = call(BIN / "rekindle", f"config {file}", start)
        assert "cheerful" in text
        assert f"{other}/rows.csv" in text
        assert "greet" in call(BIN / "rekindle", f"render {file}", start)

    (current_project / "more.csv").touch()
    text = call(
        BIN / "rekindle",
        "render ../other/configs/hello.yaml --set data.source=more.csv",
        current_project,
    )
    assert f"{current_project}/more.csv" in text, (
        "a path of the command line is relative to the working directory"
    )
    text = call(BIN / "rekindle", "config configs/hello.yaml", current_project)
    assert "cheerful" not in text
    assert f"{current_project}/rows.csv" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_config_in_a_folder_of_another_user_does_not_choose_the_project(tmp_path: Path) -> None:
    config = write_project(tmp_path / "other", packages=False) / "configs/hello.yaml"
    assert project.find_other_project(config) == tmp_path / "other"
    os.chown(config.parent, 65534, -1)
    assert project.find_other_project(config) is None


def test_the_error_for_a_wrong_module_refers_to_the_documentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(project.PATH_VARIABLE, str(ROOT))
    with pytest.raises(ConfigError, match=r"Did you mean \"steps.prepare\"") as error:
        project.load_module("steps.prepar", "step", ["run"])
    assert str(ROOT) in str(error.value)
    for kind, page in project.DOCS_BY_KIND.items():
        with pytest.raises(ConfigError, match=f"see {page}"):
            project.load_module("json", kind, ["no_such_name"])
        assert (ROOT / page).is_file()


@pytest.mark.slow
def test_a_new_project_serves_a_model_and_its_tests_pass(installed: Path, tmp_path: Path) -> None:
    rekindle = installed / "rekindle"
    python = installed / "python"
    call(rekindle, "init my-power", tmp_path)
    folder = tmp_path / "my-power"
    port = str(free_port())

    try:
        text = call(
            Path("make"),
            f"run PYTHON={python}",
            folder,
            REKINDLE_SERVE__PORT=port,
            OMP_NUM_THREADS="1",
        )

        assert f"http://127.0.0.1:{port}" in text
        assert "card succeeded" in text

        body = json.dumps({"instances": [{"hour": 18, "temperature": -5}]}).encode()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/v1/models/my-power:predict", body
        ) as answer:
            (power,) = json.load(answer)["predictions"]

        assert 35 < power < 60
    finally:
        call(rekindle, "down", folder)

    assert "2 passed" in call(Path("make"), f"test PYTHON={python} PYTEST_ADDOPTS=-v", folder)
    call(rekindle, "lint configs/my-power.yaml --set data.source=s3://raw/power.csv", folder)


def test_init_never_overwrites_files_and_can_write_only_the_workload(tmp_path: Path) -> None:
    files = create(tmp_path / "power", only_workload=True)
    assert {str(path.relative_to(tmp_path / "power")) for path in files} == {
        *("steps/power.py", "data/power.csv", "configs/power.yaml")
    }
    assert "pipeline" not in (tmp_path / "power/configs/power.yaml").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        create(tmp_path / "power")
    with pytest.raises(ConfigError, match="cannot name a project"):
        create(tmp_path / "My Project")
