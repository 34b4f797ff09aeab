"""A release is trained again in a clone of its repository. The weights are equal bit for bit, or
the command names the first difference."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.documents import ModelFile
from rekindle.errors import ConfigError
from rekindle.operations.reproduce import reproduction
from rekindle.operations.reproduce.reproduction import ReproductionRequest
from rekindle.project.template import create
from rekindle.release.origin import Origin, RunFile
from tests.commands import Shell, open_shell
from tests.waiting import until

IDENTITY = "git -c user.name=a -c user.email=a@b"
SPACE = {
    "model": {"hidden": [4, 8]},
    "train": {"learning_rate": {"low": 0.001, "high": 0.1, "log": True}},
}
SWEEP = {
    "pipeline": "pipelines.sweep",
    "sweep": {"trials": 3, "rungs": 1, "budget": {"hours": 1}, "space": SPACE},
}
APPROVAL = """
        reviewer = Parameter(name="reviewer", value_from=models.ValueFrom(supplied={}))
        approval = Task(name="approval", template=Suspend(name="wait", outputs=[reviewer]))
        model = blocks.train(data)
        approval.next(model)"""
DOWNLOAD = """from urllib.parse import urlsplit
    from rekindle import Store
    uri = urlsplit(data.source)
    Store(uri.netloc, os.environ["S3_ENDPOINT_URL"]).download(uri.path[1:], out / "raw")
    rows = np.concatenate([np.genfromtxt(file, delimiter=",", skip_header=1, dtype="float32")
                           for file in sorted((out / "raw").iterdir())])"""


PROGRAM_JOB = {"spec": {"templates": [{"resource": {"manifest": "-m rekindle.program.agent"}}]}}
ORDINARY_JOB = {"spec": {"templates": [{"resource": {"manifest": "-m rekindle.training"}}]}}


@pytest.mark.parametrize(
    ("section", "manifest"),
    [
        ({"program": {"command": ["sh", "-c", "id"]}}, ORDINARY_JOB),
        ({"mine": {"command": ["sh", "-c", "id"]}}, PROGRAM_JOB),
    ],
)
def test_a_client_of_the_bucket_cannot_choose_a_command_that_runs_on_this_machine(
    section: dict[str, Any],
    manifest: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"data": {"source": "https://example.org/data.csv"}} | section
    run = RunFile(
        parameters={"config": json.dumps(config)},
        manifest={},
        python="3.11",
        packages=[],
        modules=[],
        code={},
    )
    # the files that the hash of the release covers are the weights of a model
    model = ModelFile(sha256="ab", workload="steps.shop")
    commit = {"git_sha": "0" * 40}
    origin = Origin("shop", "3", "releases/shop/1/", "ab", commit, {}, model, run, {})

    monkeypatch.setattr(reproduction, "LocalCluster", FakeCluster)
    monkeypatch.setattr(reproduction.Store, "from_env", lambda: None)
    monkeypatch.setattr(reproduction, "read", lambda *_: origin)
    monkeypatch.setattr(reproduction.checks, "find_commit", lambda sha: sha)
    monkeypatch.setattr(reproduction, "check_out", lambda commit, folder: tmp_path)
    monkeypatch.setattr(reproduction, "render_manifest", lambda *_: manifest)
    started = list[str]()
    monkeypatch.setattr(reproduction, "run_pipeline", lambda *_: started.append("run"))

    with pytest.raises(ConfigError, match="runs a program, but shop 3 has the weights"):
        reproduction.reproduce(
            tmp_path, ReproductionRequest("shop", ignore_errors=True), lambda _: None
        )
    assert not started


class FakeCluster:
    """A cluster whose home (directory of runs) has no services."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def configmap(self, name: str) -> dict[str, str]:
        return {}

    def secret(self, name: str) -> dict[str, str]:
        return {}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell in a clone of a project that has released the model `shop`; the original project was
    deleted."""
    base = tmp_path_factory.mktemp("reproduce")
    with create_project(base) as typed:
        run_release(typed, "shop")
        move_to_clone(typed, base / "clone")
        yield typed


@contextmanager
def create_project(base: Path) -> Iterator[Shell]:
    """Create the project `shop` with its own home; yield a shell in it."""
    folder = base / "shop"
    create(folder)
    file = folder / "configs/shop.yaml"
    config = yaml.safe_load(file.read_text())
    config["train"]["epochs"] = 10
    config["train"]["validation"] = 0.1
    config["gate"]["maximum"]["rmse"] = 1000
    file.write_text(yaml.safe_dump(config))
    file.with_name("sweep.yaml").write_text(yaml.safe_dump(config | SWEEP | {"name": "sweep"}))
    (base / "tmp").mkdir()

    with open_shell(folder, REKINDLE_HOME=str(base / "home"), TMPDIR=str(base / "tmp")) as typed:
        yield typed


def run_release(typed: Shell, model: str, options: str = "") -> None:
    assert typed(f"git init -q && git add -A && {IDENTITY} commit -qm {model}").returncode == 0
    released = typed(f"rekindle run configs/{model}.yaml {options} -o json")
    assert json.loads(released.stdout)["verdict"] == "release", released.stderr


def move_to_clone(typed: Shell, target: Path) -> None:
    """Continue the test in a clone of the project, and remove the project."""
    subprocess.run(["git", "clone", "-q", str(typed.folder), str(target)], check=True)
    shutil.rmtree(typed.folder)
    typed.folder = target


def reproduce_release(
    clone: Shell, options: str = "", model: str = "shop"
) -> tuple[int, dict[str, Any], str]:
    result = clone(f"rekindle reproduce {model} {options} -o json")
    return result.returncode, json.loads(result.stdout or "{}"), result.stderr


def find_leftovers(clone: Shell) -> list[Path]:
    return list(Path(clone.environ["TMPDIR"]).glob("rekindle-reproduce-*"))


def list_registered_files(clone: Shell) -> list[str]:
    """Return the files of the releases and records in the home (directory of runs), which a
    reproduction must not change."""
    home = Path(clone.environ["REKINDLE_HOME"])
    folders = [home / name for name in ("runs", "objects", "s3/buckets", "deployments")]
    return sorted(str(path) for folder in folders for path in folder.glob("*/*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_clones_train_the_same_bits_at_once(clone: Shell) -> None:
    earlier_versions = list_registered_files(clone)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: reproduce_release(clone), range(2)))
    for code, result, errors in results:
        assert code == 0, errors
        assert result["equal"] is True, errors
        assert result["findings"] == [], errors
        assert result["model_sha256"] == result["release_sha256"]
    assert list_registered_files(clone) == earlier_versions
    assert not clone("git status --short").stdout
    until("the removal of the folder", lambda: not find_leftovers(clone))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_changed_data_and_code_are_reported_first_and_explained_if_trained_anyway(
    clone: Shell, tmp_path: Path
) -> None:
    data = (clone.folder / "data/power.csv").read_text()
    (tmp_path / "power.csv").write_text(f"{data[:-2]}{(int(data[-2]) + 1) % 10}\n")
    code, result, errors = reproduce_release(clone, f"--data {tmp_path / 'power.csv'}")
    assert code == 2, errors
    assert [(each["subject"], each["fatal"]) for each in result["findings"]] == [("data", True)], (
        errors
    )
    assert result["equal"] is None
    assert "add --ignore-errors" in errors

    step = clone.folder / "steps/shop.py"
    text = step.read_text()
    step.write_text(text.replace("square()", "abs()"))
    clone(f"{IDENTITY} commit -qam second")

    try:
        code, result, errors = reproduce_release(clone, "--commit HEAD --check")
        assert code == 2
        assert ("code", True) in [(each["subject"], each["fatal"]) for each in result["findings"]]
        assert "steps.shop" in errors
        code, result, errors = reproduce_release(clone, "--commit HEAD --ignore-errors")
        assert code == 3, errors
        assert "the first recorded step with another loss is step 1:" in result["difference"], (
            errors
        )
    finally:
        clone("git reset -q --hard HEAD^")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_reproduction_leaves_nothing_and_can_be_repeated(clone: Shell) -> None:
    earlier_versions = list_registered_files(clone)
    process = subprocess.Popen(
        ["rekindle", "reproduce", "shop"],
        cwd=clone.folder,
        env=dict(clone.environ),
        stderr=subprocess.PIPE,
        text=True,
    )

    assert process.stderr
    next(line for line in process.stderr if "train running" in line)
    homes = [str(folder) for folder in find_leftovers(clone)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    until("the removal of the folder", lambda: not find_leftovers(clone))
    until("the end of the processes", lambda: not any(map(is_running, homes)))
    assert list_registered_files(clone) == earlier_versions
    assert not clone("git status --short").stdout
    assert clone("git worktree prune -n -v && git worktree list").stdout.count("\n") == 1
    assert reproduce_release(clone)[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_data_of_an_object_store_and_an_approved_training_are_reproduced(tmp_path: Path) -> None:
    with create_project(tmp_path) as typed:
        edit_file(
            typed.folder / "pipelines/nightly.py", "        model = blocks.train(data)", APPROVAL
        )
        imports = "from hera.workflows import Parameter, Suspend, Task, models\nfrom rekindle"
        edit_file(typed.folder / "pipelines/nightly.py", "from rekindle", imports)
        step = typed.folder / "steps/shop.py"
        step.write_text("import os\n" + step.read_text())
        line = next(line for line in step.read_text().splitlines() if "genfromtxt" in line)
        edit_file(step, line.strip(), DOWNLOAD)

        assert (
            typed(
                "rekindle put data s3://rekindle/raw && rekindle put data s3://rekindle/raw-copy"
            ).returncode
            == 0
        )

        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(run_release, typed, "shop", "--set data.source=s3://rekindle/raw")
            resume = "rekindle resume $(ls $REKINDLE_HOME/runs) -p reviewer=ann"
            until("the approval", lambda: run.done() or typed(resume).returncode == 0)
            run.result()

        move_to_clone(typed, tmp_path / "clone")
        typed("rekindle put README.md s3://rekindle/raw-copy/README.md")
        code, result, errors = reproduce_release(typed)
        assert code == 0, errors
        assert result["equal"] is True, errors
        assert result["findings"] == [], errors

        shutil.rmtree(Path(typed.environ["REKINDLE_HOME"], "runs"))
        code, result, errors = reproduce_release(typed, "--check")
        assert code == 2, errors
        assert 'the value "reviewer" of the suspended step approval is not recorded' in errors, (
            errors
        )
        code, result, errors = reproduce_release(typed, "-p reviewer=ann")
        assert code == 0, errors
        assert result["equal"] is True, errors
        assert result["findings"] == [], errors

        data = typed.folder / "data/power.csv"
        data.write_text(f"{data.read_text()[:-2]}{(int(data.read_text()[-2]) + 1) % 10}\n")
        typed("rekindle put data s3://rekindle/raw")
        code, result, errors = reproduce_release(typed, "-p reviewer=ann")
        assert code == 2, errors
        assert [each["subject"] for each in result["findings"]] == ["data"], errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_the_released_trial_of_a_sweep_is_trained_again(tmp_path: Path) -> None:
    with create_project(tmp_path) as typed:
        run_release(typed, "sweep")
        move_to_clone(typed, tmp_path / "clone")
        code, result, errors = reproduce_release(typed, model="sweep")
        assert code == 0, errors
        assert result["equal"] is True, errors
        assert result["findings"] == [], errors


def edit_file(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def is_running(home: str) -> bool:
    return subprocess.run(["pgrep", "-f", home], capture_output=True).returncode == 0
