"""Format the report of `rekindle check` as text."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.wording import truncate

# maximum number of characters of an instance or a prediction
MAX_TEXT_CHARS = 100


def format_rehearsal_report(rehearsal_report: dict[str, Any]) -> str:
    """Format the report: the data, the model, the first step, and the error, if any."""
    family_reports = rehearsal_report.get("families", {})
    report_lines = [
        line
        for name in family_reports
        for line in ("", f"family      {name}", *_format_lines(family_reports[name]))
    ]
    return "\n".join(
        [*_format_lines(rehearsal_report), *report_lines, *_describe_error(rehearsal_report)]
    )


def _format_lines(family_report: dict[str, Any]) -> Iterator[str]:
    if "first_rows_error" in family_report:
        yield (
            "note        the first rows are not enough, so all rows were used:"
            f" {family_report['first_rows_error']}"
        )

    if family_report["rows"]:
        samples_text = (
            f", {family_report['samples']:,} training samples" if "samples" in family_report else ""
        )
        yield f"data        {family_report['rows']:,} rows{samples_text}"

    if "batch" in family_report:
        yield f"batch       {', '.join(map(_format_tensor, family_report['batch']))}"
    if "model" in family_report:
        yield from _describe_model(family_report)

    if "loss" in family_report:
        flops_text = (
            f", {family_report['flops_per_step']:,} FLOPs"
            if "flops_per_step" in family_report
            else ""
        )
        yield (
            f"step        loss {_format_number(family_report['loss'])}, gradient norm"
            f" {_format_number(family_report['gradient_norm'])}{flops_text}"
        )

    for name in ("validation", "metrics"):
        if name in family_report:
            figure_texts = [
                f"{key} {_format_number(metric_value)}"
                for key, metric_value in family_report[name].items()
            ]
            yield f"{name:11} {', '.join(figure_texts)}"

    if "program" in family_report:
        yield from _describe_program(family_report["program"])
    if "prediction" in family_report:
        yield (
            f"predict     {_shorten_text(family_report['instance'])} →"
            f" {_shorten_text(family_report['prediction'])}"
        )
    elif "instance" in family_report:
        yield f"instance    {_shorten_text(family_report['instance'])}"


def _describe_model(family_report: dict[str, Any]) -> Iterator[str]:
    parameter_tensors = family_report["parameters"]
    buffer_tensors = family_report["buffers"]
    trained_elements = _count_elements(
        tensor_record for tensor_record in parameter_tensors if tensor_record["trained"]
    )
    is_fitted = "state_bytes" not in family_report
    element_count_text = "fitted" if is_fitted else f"{trained_elements:,} trained"
    yield (
        f"model       {family_report['model']}: {_count_elements(parameter_tensors):,}"
        f" parameters, {element_count_text}"
    )

    for kind_prefix, tensor_records in (("", parameter_tensors), ("buffer ", buffer_tensors)):
        for tensor_record in tensor_records:
            is_trained = is_fitted or tensor_record.get("trained", True)
            frozen_text = "" if is_trained else ", frozen"
            yield (
                f"            {kind_prefix}{tensor_record['name']}:"
                f" {_format_tensor(tensor_record)}{frozen_text}"
            )

    if not is_fitted:
        yield (
            f"memory      {family_report['state_bytes']:,} bytes of training state per worker"
            f" ({family_report['device']})"
        )


def _describe_program(program_report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"save        {program_report['checkpoint']} ({program_report['format']}):"
        f" {program_report['bytes']:,} bytes, written within {program_report['save_s']:g} s"
    )
    if "interval_s" in program_report:
        interval_seconds = program_report["interval_s"]
        yield (
            f"interval    {interval_seconds:g} s between two saves: a loss costs at most this time"
        )
    if program_report.get("overwritten"):
        yield (
            "warning     the file is overwritten in place, so a kill during a save leaves only the"
            " copy in the object store: write under another name and rename the file"
        )

    if program_report.get("counted_at_end"):
        yield (
            "warning     no save counted before the end of the program: a loss costs all work"
            ", unless saves are 2 s apart: write under another name and rename the file"
        )

    if "resumed_at" in program_report:
        yield (
            f"resume      continued after SIGKILL; the next save was {program_report['resumed_at']}"
        )
    else:
        yield (
            "resume      not tried: the program ended before it could be killed; let it run longer,"
            " for example by --rows"
        )


def _describe_error(rehearsal_report: dict[str, Any]) -> Iterator[str]:
    if "error" in rehearsal_report:
        failed_stage = rehearsal_report["stage"]
        hint = ""
        if rehearsal_report.get("first_rows") and failed_stage in (
            "dataset",
            "gradient",
            "examples",
            "metrics",
        ):
            hint = " Only the first rows were used: --rows sets the number of rows."

        yield f"error       {rehearsal_report['error']}{hint}"


def _count_elements(tensor_records: Iterable[dict[str, Any]]) -> int:
    return sum(math.prod(tensor_record["shape"]) for tensor_record in tensor_records)


def _format_tensor(tensor_record: dict[str, Any]) -> str:
    return f"{tensor_record['dtype']} {tensor_record['shape']}"


def _format_number(number_or_none: float | None) -> str:
    if number_or_none is None:
        return "not a number"
    return f"{number_or_none:.4g}"


def _shorten_text(shown_value: Any) -> str:
    return truncate(to_json(shown_value), MAX_TEXT_CHARS)
