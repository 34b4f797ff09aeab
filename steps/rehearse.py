"""Try a workload on a few rows: prepare, one training step, metrics, predictions. `rekindle check`
runs this step.

    rekindle step steps.rehearse --workload=steps.digits --data='{}' \\
      --train='{"virtual_workers": 2}' --output report=report.json

If preparing the first rows requires all rows, the step only creates the model and its optimizer. If
a program trains the model, the step prepares the rows, reads their test rows, starts the program,
kills it after a save, and starts it again.
"""

import traceback
from pathlib import Path
from typing import Any

from pydantic import Field

from argolocal.common.json_text import replace_nan
from rekindle import ConfigError, DataError, RekindleError, StepInputs, StepOutputs
from rekindle.errors import innermost

MAX_EXAMPLES = 100  # maximum number of test rows to predict


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
    """Return the findings; an error of the workload is one of them.

    If `thorough`, repeat with all rows after an error that the small number of rows may cause, and
    report only the error of the repetition.
    """
    report = find(inputs, inputs.workdir / "first")
    if inputs.thorough and report.get("may_need_more_rows"):
        first_error = report["error"]
        report = find(inputs.model_copy(update={"rows": 0}), inputs.workdir / "all")
        if "error" not in report:
            report["first_rows_error"] = first_error

    # replace NaN: after a single step, an undefined loss or metric is no error of the workload
    return Outputs(report=replace_nan(report))


def find(inputs: Inputs, folder: Path) -> dict[str, Any]:
    """Try the workload once, with files in `folder`; return the findings."""
    from rekindle.project import user_exceptions

    report: dict[str, Any] = {"stage": "device", "rows": 0}

    try:
        rehearse(inputs, folder, report)
    except ModuleNotFoundError as error:
        report["stage"] = "imports"
        report["error"] = str(user_exceptions.as_error(error))
        report["exit_code"] = 1
    except Exception as error:
        if report.get("family"):
            family = f" of the family {report['family']}"
        else:
            family = ""

        is_partial = bool(report.get("first_rows"))
        where = f"`{report['stage']}`{family} failed{' on a few rows' if is_partial else ''}"
        if isinstance(error, RekindleError):
            reported = error
        else:
            reported = user_exceptions.as_error(error, where)

        traceback.print_exc()
        report.update({"error": str(reported), "exit_code": reported.exit_code})
        report["may_need_more_rows"] = is_partial and may_need_more_rows(error, report["stage"])
    else:
        report["stage"] = ""

    return report


def may_need_more_rows(error: Exception, stage: str) -> bool:
    """Return True for an error that more rows may prevent, such as an index beyond the end of a
    short dataset."""
    cause = innermost(error)
    if isinstance(error, ConfigError):
        return False
    if stage == "model" and isinstance(cause, KeyError):
        # a missing key of the facts: `prepare` does not return it, however many rows there are
        return False
    return isinstance(cause, (LookupError, ValueError, ArithmeticError, DataError))


def rehearse(inputs: Inputs, folder: Path, report: dict[str, Any]) -> None:
    """Run all stages of the rehearsal; without data, only build the model and its optimizer.

    Several families are reported in `families`.
    """
    from rekindle import families
    from rekindle import workload as workloads

    workload: Any = workloads.load(inputs.workload)
    is_program = bool(inputs.program) or not families.has_model(workload)
    names = [] if is_program else families.select(workload, inputs.families)
    report["stage"] = "prepare"
    dataset = prepare_rows(workload, inputs, folder, report)

    if is_program and dataset:
        read_test_rows(workload, dataset, report)
        if inputs.program and inputs.thorough:
            try_program(inputs, dataset, folder / "program", report)

    for name in names:
        found: dict[str, Any] = {"rows": 0, "family": name}
        try:
            rehearse_family(inputs, workload, name, dataset, folder / f"model-{name}", found)
        except Exception as error:
            report.update(found | {"rows": report["rows"]})
            if name and isinstance(error, RekindleError):
                raise type(error)(f"family {name}: {' '.join(error.lines)}") from error

            raise

        if name:
            report.setdefault("families", {})[name] = found
        else:
            report.update(found | {"rows": report["rows"]})


def rehearse_family(
    inputs: Inputs,
    workload: Any,
    name: str,
    dataset: Path | None,
    model: Path,
    report: dict[str, Any],
) -> None:
    """Build the model of one family, make a training step or fit the model, and predict."""
    from rekindle import families
    from rekindle import workload as workloads
    from rekindle.training import smoke_test
    from rekindle.training.selection import fitting

    spec = smoke_test.make_one_step_spec(inputs.train, inputs.workload, inputs.model, name)

    if dataset:
        facts = workloads.dataset_facts(dataset)
    else:
        facts = getattr(workload, "example_facts", NoFacts())

    state = None
    try:
        if isinstance(families.get_families(workload)[name], families.Fitted):
            smoke_test.try_fit(spec, workload, facts, dataset, model, report)
        else:
            state = smoke_test.build_state(spec, workload, facts, report, inputs.thorough)
    except Exception:
        if isinstance(facts, NoFacts) and facts.used:
            report["stage"] = "facts"

        raise

    if not dataset or (state and state.device.type == "meta"):
        # the training step, which is skipped here, would fail for sparse layers
        if state:
            smoke_test.reject_sparse_layers(state)

        return

    if state:
        computation = smoke_test.try_step(spec, workload, state, dataset, report)
        if inputs.thorough:
            shares = int(inputs.train["virtual_workers"])
            report["flops_per_step"] = shares * smoke_test.count_flops(computation)

        fitting.write_tensors(model, state.copy_released_tensors(), spec.identity())

    predict(workload, dataset, model, report)


def prepare_rows(
    workload: Any, inputs: Inputs, folder: Path, report: dict[str, Any]
) -> Path | None:
    """Return a dataset of the first rows; None if it cannot be prepared and `thorough` is false."""
    from rekindle.sections import parse_section
    from rekindle.step import parse_time
    from steps.monitoring import moving_window

    dataset = folder / "dataset"
    source = folder / "rows"
    source.mkdir(parents=True)

    try:
        time = parse_time(inputs.scheduled)
        data = parse_section(workload.Data, inputs.data, "data").at(time)

        few = data.first_rows(inputs.rows, source) if inputs.rows else data
        if not few and not inputs.thorough:
            return None

        report["first_rows"] = bool(few and inputs.rows)
        prepared, _ = moving_window.prepare(workload, few or data, dataset, time)
    except Exception as error:
        if inputs.thorough:
            raise

        report["unprepared"] = str(error)
        return None

    report["rows"] = prepared.rows
    return dataset


def read_test_rows(workload: Any, dataset: Path, report: dict[str, Any]) -> None:
    """Read some test rows, and check their instances, unless the workload has a predictor or a
    `score` of its own."""
    from rekindle.release import evaluation
    from rekindle.release.examples import Examples, parse_instances
    from rekindle.release.predictor import make_request_model

    report["stage"] = "examples"
    examples = evaluation.read_examples(workload, dataset, max_rows=MAX_EXAMPLES)
    if not hasattr(workload, "predictor") and type(examples).score is Examples.score:
        parse_instances(examples, make_request_model(workload))
    if len(examples.instances):
        report["instance"] = examples.instances[0]


def try_program(inputs: Inputs, dataset: Path, folder: Path, report: dict[str, Any]) -> None:
    """Start the program, kill it after its first checkpoint, and start it again."""
    from rekindle.program.config import ProgramConfig
    from rekindle.program.resume_check import ResumeCheck

    report["stage"] = "program"
    program = ProgramConfig.model_validate(inputs.program)
    report["program"] = ResumeCheck(program, inputs.model, dataset, folder).run()


def predict(workload: Any, dataset: Path, model: Path, report: dict[str, Any]) -> None:
    """Predict some test rows, and compute the metrics."""
    from rekindle.release import evaluation

    report["stage"] = "examples"
    examples = evaluation.read_examples(workload, dataset, max_rows=MAX_EXAMPLES)
    report["stage"] = "predict"
    predictions = evaluation.score(examples, model, dataset)

    if len(examples.instances):
        report["instance"] = examples.instances[0]
        report["prediction"] = predictions[0]

    report["stage"] = "metrics"
    report["metrics"] = evaluation.average_parts(
        evaluation.compute_metrics(workload.metrics, predictions, examples)
    )
