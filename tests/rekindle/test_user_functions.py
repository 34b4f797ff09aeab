"""An exception in any function of a user is reported with type, text and FILE:LINE, and ends its
step with code 70.

Each row of the tables breaks one function of a complete workload, step or pipeline, and runs the
program that calls it. tests/rekindle/view/test_outcomes.py tests that the rendered retry strategies
do not repeat a step with this code.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rekindle import tracking
from rekindle.content.weights import weights_sha256
from rekindle.errors import CodeError
from rekindle.release.predictor import open_predictor
from rekindle.release.release_files import EXAMPLE_FILE
from rekindle.serving.model_process import ModelProcess, answer_batch
from rekindle.step import main
from rekindle.storage import Store
from rekindle.workload import load, prepare
from tests.commands import BIN
from tests.rekindle.serving.running import prefix_of
from tests.rekindle.serving.running import write_release as write_release
from tests.rekindle.training.crew import Crew, make_flags

WORKLOAD = '''
"""A regression with every function that a workload may have; a comment with its name begins each one."""

import numpy as np
from pydantic import BaseModel, model_validator

from rekindle import DataConfig, Metric, Prepared, Refreshed, Section


class Data(DataConfig):
    @model_validator(mode="after")
    def check(self):
        # Data
        return self

    def at(self, time):
        # at
        return self


class Model(Section):
    pass


class Instance(BaseModel):
    hour: float

    @model_validator(mode="after")
    def check(self):
        # Instance
        return self


def rmse(predictions, truths):
    # metric
    return ((predictions - truths) ** 2).mean() ** 0.5


metrics = (Metric("rmse", rmse, better="lower"),)


def prepare(data, out):
    # prepare
    np.save(out / "rows.npy", np.arange(80, dtype="float32").reshape(40, 2))
    return Prepared(rows=40)


class dataset:
    def __init__(self, path, split):
        # dataset
        import torch

        self.rows = torch.from_numpy(np.load(path / "rows.npy"))

    def __len__(self):
        # length
        return len(self.rows)

    def batch(self, indices):
        # batch
        return self.rows[indices, :1], self.rows[indices, 1:]


def model(section, facts):
    # model
    import torch

    return torch.nn.Linear(1, 1)


def loss(model, batch):
    # loss
    return (model(batch[0]) - batch[1]).square().mean()


def optimizer(model, train):
    # optimizer
    import torch

    return torch.optim.SGD(model.parameters(), lr=train.learning_rate)


def schedule(step, total):
    # schedule
    return 1.0


def measures(model, batch):
    # measures
    return {}


def examples(path):
    # examples
    yield from (({"hour": hour}, kwh) for hour, kwh in dataset(path, "test").rows.tolist())


def predict(model, instances, facts):
    # predict
    import torch

    return model(torch.tensor([[row.hour] for row in instances])).flatten().tolist()


def refresh(release, data, out):
    # refresh
    return None
'''
STEP = """
from rekindle import StepInputs, StepOutputs


class Inputs(StepInputs):
    pass


class Outputs(StepOutputs):
    pass


def run(inputs):
    # step
    return Outputs()
"""
PIPELINE = """
from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        # build
        blocks.prepare()
    return workflow
"""


class Stage:
    """A folder with modules that a user has written, and the results of the steps before the broken
    one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = folder / "dataset"
        workload: Any = load(self.write(WORKLOAD)[0])
        self.digest = prepare(workload, workload.Data(source="made://up"), self.dataset)[1]

    def write(self, text: str, function: str = "") -> tuple[str, str]:
        """Write a module whose `function` raises an exception; return its name and the expected
        message."""
        lines = text.splitlines()
        number = next(
            (number for number, line in enumerate(lines) if line.strip() == f"# {function}"), -1
        )
        if function:
            lines[number] = lines[number].replace(f"# {function}", "{}['kwh']")
        name = f"user_{uuid4().hex}"
        file = self.folder / f"{name}.py"
        file.write_text("\n".join(lines) + "\n")
        return name, f"{file}:{number + 1}: KeyError: 'kwh'."

    def make_release(self, workload: str) -> Path:
        """Create a folder with a trained model of `workload` and the other files that a model
        server needs."""
        import torch
        from safetensors.torch import save_file

        model = self.folder / f"model-{workload}"
        model.mkdir()
        tensors = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
        save_file(tensors, model / "model.safetensors")

        description = {
            "sha256": weights_sha256(tensors),
            "workload": workload,
            "model": {},
            "train": {},
        }

        (model / "model.json").write_text(json.dumps(description))
        (model / EXAMPLE_FILE).write_text('{"instances": [{"hour": 1}]}')
        (model / "dataset.json").write_bytes((self.dataset / "dataset.json").read_bytes())

        return model


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory, s3_environment: dict[str, str]
) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("user")
        for name, value in (
            s3_environment | {"REKINDLE_PATH": str(folder), "TMPDIR": str(folder)}
        ).items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [*sys.path])
        stage = Stage(folder)
        Store.from_env().upload(stage.dataset, "user/dataset")
        yield stage


def run_prepare(workload: str, stage: Stage) -> int:
    return main(
        [
            "steps.prepare",
            f"--workload={workload}",
            '--data={"source": "made://up"}',
            f"--workflow={workload}",
        ]
    )


def run_evaluate(workload: str, stage: Stage) -> int:
    model = stage.make_release(workload)
    # only a release has the facts of its dataset
    (model / "dataset.json").unlink()
    return main(
        [
            "steps.evaluate",
            f"--workload={workload}",
            f"--dataset={stage.dataset}",
            f"--model={model}",
        ]
    )


def run_refresh(workload: str, stage: Stage) -> int:
    """Refresh the champion of a model."""
    name = f"m-{workload[-8:]}"
    store = Store.from_env()
    prefix = prefix_of(name, workload)
    run_id = tracking.start_run(name, "first")
    sha256 = write_release(store, prefix, workload)

    tracking.record_champion(
        name,
        tracking.register_version(name, prefix, store.uri(prefix), sha256, run_id, {}).version,
        "servers-1",
    )

    flags = [
        f"--workload={workload}",
        f"--name={name}",
        '--data={"source": "made://up"}',
        f"--workflow={name}",
    ]

    return main(["steps.refresh", *flags, f"--experiment={name}"])


def run_server(workload: str, stage: Stage) -> int:
    """Start the process of a server that runs the model; an error of this process is reported as
    the server's error."""
    release = stage.make_release(workload)
    process = ModelProcess(max_instances=10, max_batch=4)
    try:
        process.load(release)
    except CodeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        process.end()
    return 0


def run_step(step: str, stage: Stage) -> int:
    return main([step])


# function → module and the program that calls it
STEPS: dict[str, tuple[str, Callable[[str, Stage], int]]] = {
    **dict.fromkeys(("Data", "at", "prepare"), (WORKLOAD, run_prepare)),
    **dict.fromkeys(
        ("examples", "metric", "Instance", "predict", "model"), (WORKLOAD, run_evaluate)
    ),
    "refresh": (WORKLOAD, run_refresh),
    "step": (STEP, run_step),
}
TRAINING = ("dataset", "length", "batch", "model", "loss", "optimizer", "schedule", "measures")


@pytest.mark.usefixtures("mlflow_server")
@pytest.mark.parametrize(
    ("function", "program"),
    [
        *((name, program) for name, (_, program) in STEPS.items()),
        ("model", run_server),
        *(
            pytest.param(name, run_server, marks=pytest.mark.slow)
            for name in ("Instance", "predict")
        ),
    ],
)
def test_an_exception_ends_the_step_with_its_line_and_without_a_retry(
    stage: Stage,
    capfd: pytest.CaptureFixture[str],
    function: str,
    program: Callable[[str, Stage], int],
) -> None:
    name, expected = stage.write(STEPS[function][0], function)
    assert program(name, stage) == CodeError.exit_code
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1].startswith("error: ")
    assert errors[-1].endswith(expected)
    assert "Traceback (most recent call last):" in errors


@pytest.mark.usefixtures("mlflow_server")
def test_a_type_error_of_a_validator_is_not_blamed_on_the_test_rows(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    workload, _ = stage.write(WORKLOAD.replace("# Instance", "None + 1"))
    assert run_evaluate(workload, stage) == CodeError.exit_code
    assert (
        f"{workload}.py:30: TypeError: unsupported operand"
        in capfd.readouterr().err.splitlines()[-1]
    )


@pytest.mark.usefixtures("mlflow_server")
def test_a_dataset_without_tags_is_reported_without_empty_braces(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_prepare(stage.write(WORKLOAD)[0], stage) == 0
    assert "prepared 40 rows, 0 rejected" in capfd.readouterr().err.splitlines()


@pytest.mark.parametrize(
    "function",
    [
        name if name in ("loss", "schedule") else pytest.param(name, marks=pytest.mark.slow)
        for name in TRAINING
    ],
)
def test_an_exception_in_training_ends_the_job_with_its_line(
    stage: Stage, crew: Crew, function: str
) -> None:
    workload, expected = stage.write(WORKLOAD, function)
    argv = make_flags(
        workload,
        workload=workload,
        dataset="user/dataset",
        digest=stage.digest,
        workers=1,
        validation=0.2,
        validation_steps=1,
    )

    variables = {"REKINDLE_PATH": str(stage.folder)}
    coordinator = crew.start_coordinator(argv, **variables)
    launcher = crew.start_light_launcher("pod", argv, **variables)
    assert (launcher.wait_for_exit_code(), coordinator.wait_for_exit_code()) == (
        CodeError.exit_code,
    ) * 2, launcher.read_log()
    assert launcher.read_log().count("restarting it") <= 1, launcher.read_log()

    for process in (launcher, coordinator):
        assert any(
            line.startswith("error: ") and expected in line
            for line in process.read_log().splitlines()
        )


@pytest.mark.parametrize("function", ["Instance", "predict"])
def test_an_exception_for_one_request_is_logged_with_its_line_and_the_server_continues(
    stage: Stage, capfd: pytest.CaptureFixture[str], function: str
) -> None:
    text = WORKLOAD.replace(
        f"# {function}\n",
        f"if {'self' if function == 'Instance' else 'instances[0]'}.hour > 9:\n"
        f"            # {function}\n",
    )
    workload, expected = stage.write(text, function)
    predictor = open_predictor(stage.make_release(workload))
    bodies = [json.dumps({"instances": [{"hour": hour}]}).encode() for hour in (1, 10)]
    assert [answer.status for answer in answer_batch(predictor, bodies, 10).answers] == [200, 500]
    file, line, error = expected.removesuffix(".").split(":", 2)
    log = capfd.readouterr().err
    assert f'File "{file}", line {line}' in log
    assert error.strip() in log


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("text", "function"), [(WORKLOAD, "Data"), (PIPELINE, "build")])
def test_an_exception_before_the_run_is_one_line(stage: Stage, text: str, function: str) -> None:
    module, expected = stage.write(text, function)
    workload, pipeline = (
        (module, "pipelines.training") if text == WORKLOAD else (stage.write(WORKLOAD)[0], module)
    )
    config = stage.folder / f"{module}.yaml"
    config.write_text(
        f"{{name: user, pipeline: {pipeline}, workload: {workload}, data: {{source: 'made://up'}}}}"
    )
    result = subprocess.run(
        [BIN / "rekindle", "lint", config], cwd=stage.folder, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
