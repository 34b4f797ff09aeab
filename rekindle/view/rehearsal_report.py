"""Format the report of `rekindle check` as text."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.wording import cut

MAX_TEXT = 100  # maximum number of characters of an instance or a prediction


def text(report: dict[str, Any]) -> str:
    """Format the report: the data, the model, the first step, and the error, if any."""
    families = report.get("families", {})
    parts = [
        line for name in families for line in ("", f"family      {name}", *_lines(families[name]))
    ]
    return "\n".join([*_lines(report), *parts, *_error(report)])


def _lines(report: dict[str, Any]) -> Iterator[str]:
    if "first_rows_error" in report:
        yield (
            "note        the first rows are not enough, so all rows were used:"
            f" {report['first_rows_error']}"
        )

    if report["rows"]:
        samples = f", {report['samples']:,} training samples" if "samples" in report else ""
        yield f"data        {report['rows']:,} rows{samples}"

    if "batch" in report:
        yield f"batch       {', '.join(map(_tensor, report['batch']))}"
    if "model" in report:
        yield from _describe_model(report)

    if "loss" in report:
        flops = f", {report['flops_per_step']:,} FLOPs" if "flops_per_step" in report else ""
        yield (
            f"step        loss {_number(report['loss'])}, gradient norm"
            f" {_number(report['gradient_norm'])}{flops}"
        )

    for name in ("validation", "metrics"):
        if name in report:
            figures = [f"{key} {_number(value)}" for key, value in report[name].items()]
            yield f"{name:11} {', '.join(figures)}"

    if "program" in report:
        yield from _describe_program(report["program"])
    if "prediction" in report:
        yield f"predict     {_short(report['instance'])} → {_short(report['prediction'])}"
    elif "instance" in report:
        yield f"instance    {_short(report['instance'])}"


def _describe_model(report: dict[str, Any]) -> Iterator[str]:
    parameters = report["parameters"]
    buffers = report["buffers"]
    trained = _count_elements(value for value in parameters if value["trained"])
    is_fitted = "state_bytes" not in report
    count = "fitted" if is_fitted else f"{trained:,} trained"
    yield f"model       {report['model']}: {_count_elements(parameters):,} parameters, {count}"

    for kind, values in (("", parameters), ("buffer ", buffers)):
        for value in values:
            is_trained = is_fitted or value.get("trained", True)
            frozen = "" if is_trained else ", frozen"
            yield f"            {kind}{value['name']}: {_tensor(value)}{frozen}"

    if not is_fitted:
        yield (
            f"memory      {report['state_bytes']:,} bytes of training state per worker"
            f" ({report['device']})"
        )


def _describe_program(program: dict[str, Any]) -> Iterator[str]:
    yield (
        f"save        {program['checkpoint']} ({program['format']}): {program['bytes']:,} bytes,"
        f" written within {program['save_s']:g} s"
    )
    if "interval_s" in program:
        seconds = program["interval_s"]
        yield f"interval    {seconds:g} s between two saves: a loss costs at most this time"
    if program.get("overwritten"):
        yield (
            "warning     the file is overwritten in place, so a kill during a save leaves only the"
            " copy in the object store: write under another name and rename the file"
        )

    if program.get("counted_at_end"):
        yield (
            "warning     no save counted before the end of the program: a loss costs all work"
            ", unless saves are 2 s apart: write under another name and rename the file"
        )

    if "resumed_at" in program:
        yield f"resume      continued after SIGKILL; the next save was {program['resumed_at']}"
    else:
        yield (
            "resume      not tried: the program ended before it could be killed; let it run longer,"
            " for example by --rows"
        )


def _error(report: dict[str, Any]) -> Iterator[str]:
    if "error" in report:
        stage = report["stage"]
        hint = ""
        if report.get("first_rows") and stage in ("dataset", "gradient", "examples", "metrics"):
            hint = " Only the first rows were used: --rows sets the number of rows."

        yield f"error       {report['error']}{hint}"


def _count_elements(values: Iterable[dict[str, Any]]) -> int:
    return sum(math.prod(value["shape"]) for value in values)


def _tensor(value: dict[str, Any]) -> str:
    return f"{value['dtype']} {value['shape']}"


def _number(value: float | None) -> str:
    if value is None:
        return "not a number"
    return f"{value:.4g}"


def _short(value: Any) -> str:
    return cut(to_json(value), MAX_TEXT)
