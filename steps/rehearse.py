"""Try a workload on a few rows: prepare, one training step, metrics, predictions. `rekindle check`
runs this step.

    rekindle step steps.rehearse --workload=steps.digits --data='{}' \\
      --train='{"virtual_workers": 2}' --output report=report.json

If preparing the first rows requires all rows, the step only creates the model and its optimizer. If
a program trains the model, the step prepares the rows, reads the test rows, starts the program,
kills the program after a save, and starts it again.
"""

import traceback
from pathlib import Path
from typing import Any

from pydantic import Field

from argolocal.common.json_text import replace_nan
from rekindle import ConfigError, DataError, RekindleError, StepInputs, StepOutputs
from rekindle.errors import find_innermost_cause

# maximum number of test rows to predict
MAX_EXAMPLES = 100


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the data, the model and its metrics")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    model: dict[str, Any] = Field(
        default_factory=dict, description="the config's section `model`, as JSON"
    )
    train: dict[str, Any] = Field(
        default_factory=dict, description="the config's section `train`, as JSON"
    )
    program: dict[str, Any] = Field(
        default_factory=dict, description="the config's section `program`, as JSON; {} without one"
    )
    families: list[str] = Field(default_factory=list, description="families to try (empty: all)")
    rows: int = Field(
        1000, ge=0, description="number of rows to try the workload on; 0: all of the data"
    )
    scheduled: str = Field(
        "", description="scheduled time of the run, at which a moving window ends; empty: now"
    )
    thorough: bool = Field(
        False, description="use all of the data if its first rows cannot be separated; count FLOPs"
    )


class Outputs(StepOutputs):
    report: dict[str, Any] = Field(
        description="the findings; after an error also `error`, `exit_code` and `stage`"
    )


class NoFacts(dict[str, Any]):
    """Empty facts of a dataset that was not prepared; `used` is True if the workload has read
    them."""

    used = False

    def __missing__(self, key: str) -> Any:
        self.used = True
        raise KeyError(key)

    def get(self, key: str, default: object = None) -> Any:
        self.used = True
        return default


def run(inputs: Inputs) -> Outputs:
    """Try the workload, and return the report; an error of the workload is part of the report.

    With `thorough`, an error that the small number of rows may cause is followed by a second try
    with all rows, and only an error of the second try is reported.
    """
    rehearsal_report = try_workload(inputs, inputs.workdir / "first")
    if inputs.thorough and rehearsal_report.get("may_need_more_rows"):
        first_error = rehearsal_report["error"]
        rehearsal_report = try_workload(
            inputs.model_copy(update={"rows": 0}), inputs.workdir / "all"
        )
        if "error" not in rehearsal_report:
            rehearsal_report["first_rows_error"] = first_error

    # after a single training step, a loss or metric that is NaN is not an error of the workload
    return Outputs(report=replace_nan(rehearsal_report))


def try_workload(inputs: Inputs, rehearsal_folder: Path) -> dict[str, Any]:
    """Try the workload once, with files in `rehearsal_folder`; return the report with the
    findings."""
    from rekindle.project import user_exceptions

    rehearsal_report: dict[str, Any] = {"stage": "device", "rows": 0}

    try:
        rehearse(inputs, rehearsal_folder, rehearsal_report)
    except ModuleNotFoundError as error:
        rehearsal_report["stage"] = "imports"
        rehearsal_report["error"] = str(user_exceptions.convert_exception(error))
        rehearsal_report["exit_code"] = 1
    except Exception as error:
        if rehearsal_report.get("family"):
            family_phrase = f" of the family {rehearsal_report['family']}"
        else:
            family_phrase = ""

        is_partial = bool(rehearsal_report.get("first_rows"))
        failure_location = (
            f"`{rehearsal_report['stage']}`{family_phrase}"
            f" failed{' on a few rows' if is_partial else ''}"
        )
        if isinstance(error, RekindleError):
            reported_error = error
        else:
            reported_error = user_exceptions.convert_exception(error, failure_location)

        traceback.print_exc()
        rehearsal_report.update(
            {"error": str(reported_error), "exit_code": reported_error.exit_code}
        )
        rehearsal_report["may_need_more_rows"] = is_partial and may_need_more_rows(
            error, rehearsal_report["stage"]
        )
    else:
        rehearsal_report["stage"] = ""

    return rehearsal_report


def may_need_more_rows(error: Exception, stage_name: str) -> bool:
    """Return True for an error that more rows may prevent, such as an index beyond the end of a
    short dataset."""
    innermost_error = find_innermost_cause(error)
    if isinstance(error, ConfigError):
        return False
    if stage_name == "model" and isinstance(innermost_error, KeyError):
        # the facts lack a key that `prepare` does not return for any number of rows
        return False
    return isinstance(innermost_error, (LookupError, ValueError, ArithmeticError, DataError))


def rehearse(inputs: Inputs, rehearsal_folder: Path, rehearsal_report: dict[str, Any]) -> None:
    """Run all stages of the rehearsal; without data, only build the model and its optimizer.

    If the workload has several families, they are reported in `families`.
    """
    from rekindle import families
    from rekindle import workload as workloads

    workload_module: Any = workloads.load(inputs.workload)
    is_program = bool(inputs.program) or not families.has_model(workload_module)
    family_names = [] if is_program else families.select_families(workload_module, inputs.families)
    rehearsal_report["stage"] = "prepare"
    dataset_folder = prepare_rows(workload_module, inputs, rehearsal_folder, rehearsal_report)

    if is_program and dataset_folder:
        read_test_rows(workload_module, dataset_folder, rehearsal_report)
        if inputs.program and inputs.thorough:
            try_program(inputs, dataset_folder, rehearsal_folder / "program", rehearsal_report)

    for family_name in family_names:
        family_report: dict[str, Any] = {"rows": 0, "family": family_name}
        try:
            rehearse_family(
                inputs,
                workload_module,
                family_name,
                dataset_folder,
                rehearsal_folder / f"model-{family_name}",
                family_report,
            )
        except Exception as error:
            rehearsal_report.update(family_report | {"rows": rehearsal_report["rows"]})
            if family_name and isinstance(error, RekindleError):
                raise type(error)(f"family {family_name}: {' '.join(error.lines)}") from error

            raise

        if family_name:
            rehearsal_report.setdefault("families", {})[family_name] = family_report
        else:
            rehearsal_report.update(family_report | {"rows": rehearsal_report["rows"]})


def rehearse_family(
    inputs: Inputs,
    workload_module: Any,
    family_name: str,
    dataset_folder: Path | None,
    model_folder: Path,
    rehearsal_report: dict[str, Any],
) -> None:
    """Build the model of one family, make a training step or fit the model, and predict."""
    from rekindle import families
    from rekindle import workload as workloads
    from rekindle.training import smoke_test
    from rekindle.training.selection import fitting

    one_step_spec = smoke_test.make_one_step_spec(
        inputs.train, inputs.workload, inputs.model, family_name
    )

    if dataset_folder:
        dataset_facts = workloads.read_dataset_facts(dataset_folder)
    else:
        dataset_facts = getattr(workload_module, "example_facts", NoFacts())

    training_state = None
    try:
        if isinstance(families.get_families(workload_module)[family_name], families.Fitted):
            smoke_test.try_fit_model(
                one_step_spec,
                workload_module,
                dataset_facts,
                dataset_folder,
                model_folder,
                rehearsal_report,
            )
        else:
            training_state = smoke_test.build_state(
                one_step_spec, workload_module, dataset_facts, rehearsal_report, inputs.thorough
            )
    except Exception:
        if isinstance(dataset_facts, NoFacts) and dataset_facts.used:
            rehearsal_report["stage"] = "facts"

        raise

    if not dataset_folder or (training_state and training_state.device.type == "meta"):
        # the training step, which is skipped here, would fail for sparse layers
        if training_state:
            smoke_test.reject_sparse_layers(training_state)

        return

    if training_state:
        step_computation = smoke_test.try_training_step(
            one_step_spec, workload_module, training_state, dataset_folder, rehearsal_report
        )
        if inputs.thorough:
            virtual_worker_count = int(inputs.train["virtual_workers"])
            rehearsal_report["flops_per_step"] = virtual_worker_count * smoke_test.count_flops(
                step_computation
            )

        fitting.write_tensors(
            model_folder, training_state.copy_released_tensors(), one_step_spec.identity()
        )

    predict(workload_module, dataset_folder, model_folder, rehearsal_report)


def prepare_rows(
    workload_module: Any, inputs: Inputs, rehearsal_folder: Path, rehearsal_report: dict[str, Any]
) -> Path | None:
    """Return a dataset of the first rows; None if this dataset cannot be prepared and `thorough` is
    false."""
    from rekindle.sections import parse_section
    from rekindle.step import parse_time
    from steps.monitoring import moving_window

    dataset_folder = rehearsal_folder / "dataset"
    source_folder = rehearsal_folder / "rows"
    source_folder.mkdir(parents=True)

    try:
        scheduled_time = parse_time(inputs.scheduled)
        data_settings = parse_section(workload_module.Data, inputs.data, "data").at(scheduled_time)

        few_rows_settings = (
            data_settings.first_rows(inputs.rows, source_folder) if inputs.rows else data_settings
        )
        if not few_rows_settings and not inputs.thorough:
            return None

        rehearsal_report["first_rows"] = bool(few_rows_settings and inputs.rows)
        prepared_dataset, _ = moving_window.prepare(
            workload_module, few_rows_settings or data_settings, dataset_folder, scheduled_time
        )
    except Exception as error:
        if inputs.thorough:
            raise

        rehearsal_report["unprepared"] = str(error)
        return None

    rehearsal_report["rows"] = prepared_dataset.rows
    return dataset_folder


def read_test_rows(
    workload_module: Any, dataset_folder: Path, rehearsal_report: dict[str, Any]
) -> None:
    """Read some test rows, and check their instances, unless the workload has a predictor or a
    `score` of its own."""
    from rekindle.release import evaluation
    from rekindle.release.examples import Examples, parse_instances
    from rekindle.release.predictor import make_request_model

    rehearsal_report["stage"] = "examples"
    test_examples = evaluation.read_examples(workload_module, dataset_folder, max_rows=MAX_EXAMPLES)
    if not hasattr(workload_module, "predictor") and type(test_examples).score is Examples.score:
        parse_instances(test_examples, make_request_model(workload_module))
    if len(test_examples.instances):
        rehearsal_report["instance"] = test_examples.instances[0]


def try_program(
    inputs: Inputs, dataset_folder: Path, rehearsal_folder: Path, rehearsal_report: dict[str, Any]
) -> None:
    """Start the training program, kill it after its first checkpoint, and start it again."""
    from rekindle.program.config import ProgramConfig
    from rekindle.program.resume_check import ResumeCheck

    rehearsal_report["stage"] = "program"
    program_config = ProgramConfig.model_validate(inputs.program)
    rehearsal_report["program"] = ResumeCheck(
        program_config, inputs.model, dataset_folder, rehearsal_folder
    ).run()


def predict(
    workload_module: Any, dataset_folder: Path, model_folder: Path, rehearsal_report: dict[str, Any]
) -> None:
    """Predict some test rows, and compute the metrics."""
    from rekindle.release import evaluation

    rehearsal_report["stage"] = "examples"
    test_examples = evaluation.read_examples(workload_module, dataset_folder, max_rows=MAX_EXAMPLES)
    rehearsal_report["stage"] = "predict"
    predictions = evaluation.score(test_examples, model_folder, dataset_folder)

    if len(test_examples.instances):
        rehearsal_report["instance"] = test_examples.instances[0]
        rehearsal_report["prediction"] = predictions[0]

    rehearsal_report["stage"] = "metrics"
    rehearsal_report["metrics"] = evaluation.average_parts(
        evaluation.compute_metrics(workload_module.metrics, predictions, test_examples)
    )
