"""Show runs and Deployments of this machine: the tables of `argolocal status`, and the logs of a
run.

A run is a directory in .argolocal/runs (argolocal/state/journal.py), which this module only reads.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from argolocal.common import causes, program
from argolocal.common.json_text import to_json
from argolocal.common.processes import is_alive
from argolocal.common.wording import escape_control_chars, escape_to_one_line, format_duration
from argolocal.engine.suspend import list_suspended_nodes
from argolocal.errors import ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.state.journal import MANIFEST_FILE, RunFiles
from argolocal.view import display, summary
from argolocal.view.summary import (
    FINISHED_PHASES,
    Status,
    Step,
    check_step,
    list_named_warnings,
    list_steps,
    parse_timestamp,
)

QUEUED_MESSAGE = "Waiting for a place in the queue of `{} server`"
# function that returns the row of a run in the table of runs; arguments: name, status, phase,
# creation time
MakeRow = Callable[[str, Status, str, str | None], dict[str, str]]


def list_run_names(home: Path) -> list[str]:
    """Return the names of the runs in a home (a directory of runs), newest first."""
    manifest_files = [run_files.root / MANIFEST_FILE for run_files in RunFiles.all(home)]
    return [
        path.parent.name
        for path in sorted(manifest_files, key=lambda path: path.stat().st_mtime, reverse=True)
    ]


def find_newest(home: Path, phases: Collection[str] = ()) -> str:
    """Return the name of the newest run. If `phases` are given, only runs in these phases count.
    Raises ConfigError."""
    for run_name, status in _list_runs(home):
        if not phases or status["phase"] in phases:
            return run_name
    wanted_run = f"run that is {' or '.join(phases).lower()}" if phases else "run"
    raise ConfigError(
        f"there is no {wanted_run} in {home}: `{program.name} status` lists all runs,"
        f" `{program.name} run` starts a run."
    )


def find_resumable(home: Path) -> str:
    """Return the name of the newest run that is suspended, interrupted or failed. Raises
    ConfigError."""
    phases = ("Interrupted", "Failed", "Error")
    for name, status in _list_runs(home):
        if status["phase"] in phases or (
            status["phase"] == "Running" and _is_suspended(home, name, status)
        ):
            return name
    return find_newest(home, (*phases, "Suspended"))


def _is_suspended(home: Path, name: str, status: Status) -> bool:
    """Return True if a step of a run, or the whole run, waits for `resume`."""
    return bool(
        next(iter(list_suspended_nodes(status)), None)
        or RunFiles(home, name).workflow()["spec"].get("suspend")
    )


def load_status(home: Path, run_name: str) -> dict[str, Any]:
    """Return the status of a run, with the phase Interrupted if its runner has died. Raises
    ConfigError if the run does not exist."""
    run_files = RunFiles(home, run_name)
    run_files.workflow()
    status, _ = run_files.load()
    return settle_phase(status, run_files)


def settle_phase(status: dict[str, Any], run_files: RunFiles) -> dict[str, Any]:
    """Return a status from the journal of a run with the actual phase, which is Running while a
    runner exists, Pending if the run waits for the server, and Interrupted if the runner has
    died."""
    if status.get("phase") in FINISHED_PHASES:
        return status
    if run_files.runner():
        return {**status, "phase": "Running"}
    if not status.get("phase") and run_files.queue_entry.exists():
        return {**status, "phase": "Pending", "message": QUEUED_MESSAGE.format(program.name)}
    return {**status, "phase": "Interrupted"}


def show_all(cluster: LocalCluster, as_json: bool, make_row: MakeRow | None = None) -> str:
    """Return the tables of runs and Deployments. `make_row`: function that returns the row of a run
    (default: make_run_row)."""
    make_row = make_row or make_run_row
    run_rows = [
        make_row(run_name, status, status["phase"], _find_creation(cluster.home, run_name, status))
        for run_name, status in _list_runs(cluster.home)
    ]
    tables = {"runs": run_rows, "serving": cluster.overview()}
    return show_tables(
        tables, as_json, f"no runs in {cluster.home} yet: `{program.name} run` starts a run"
    )


def _find_creation(home: Path, name: str, status: Status) -> str | None:
    """Return the time of a run's creation, or None if the run's files are unreadable. A run that
    waits in the queue has not started."""
    if status["phase"] == "Unreadable":
        return None
    if status.get("startedAt"):
        return str(status["startedAt"])
    with suppress(ConfigError):
        return RunFiles(home, name).workflow()["metadata"].get("creationTimestamp")
    return None


def show_run(home: Path, name: str, as_json: bool) -> str:
    """Return the status of one run, as a table of its steps or as a JSON object."""
    status = load_status(home, name)
    if as_json:
        return to_json(make_status_object(home, name, status), indent=2)
    return format_steps_table(name, status) + format_processes_table(list_processes(home, name))


def make_status_object(home: Path, name: str, status: Status) -> dict[str, Any]:
    """Return the object that `argolocal status NAME -o json` prints."""
    return summary.make_json_object(name, status) | {"processes": list_processes(home, name)}


def format_processes_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of running pods, which is shown after the table of steps, or "" if no pods
    are running."""
    if rows:
        return f"\n\n{format_table(rows)}"
    return ""


def format_steps_table(name: str, status: Status, shown_steps: list[Step] | None = None) -> str:
    """Return a table of the steps `shown_steps` (default: all steps of a run) with their phases and
    durations."""
    table_rows = [
        {
            "step": "  " * step.depth + step.label,
            "phase": step.phase,
            "took": format_duration(step.seconds),
            "message": " ".join(causes.extract_cause(step.message).split())[:80]
            or summary.describe_progress(step),
        }
        for step in (list_steps(name, status) if shown_steps is None else shown_steps)
    ]

    heading = (
        f"{name}: {status.get('phase') or 'Pending'}"
        f" {escape_control_chars(summary.find_run_message(name, status))}"
    )
    warning_lines = [
        f"\nwarning: {escape_control_chars(warning_text)}"
        for warning_text in list_named_warnings((status.get("nodes") or {}).values())
    ]

    return heading.rstrip() + "\n\n" + format_table(table_rows) + "".join(warning_lines)


def list_processes(home: Path, name: str) -> list[dict[str, Any]]:
    """Return the names of the pods of a run that are running, each with the pid of its first
    process. Each of these pods ends when this process exits."""
    run_files = RunFiles(home, name)
    if not run_files.runner():
        return []

    status, process_records = run_files.load()
    record_of_pod = {
        status["nodes"][node_id]["displayName"]: process_record
        for node_id, process_record in process_records.items()
        if node_id in status["nodes"]
    }
    for pid_file in sorted((run_files.root / "pids").glob("*")):
        # if a pod has just ended, its record may be deleted or incomplete
        with suppress(OSError, ValueError):
            record_of_pod[pid_file.name.removeprefix(f"{name}-")] = json.loads(pid_file.read_text())

    return [
        {"pod": pod_name, "pid": process_record[0]}
        for pod_name, process_record in record_of_pod.items()
        if is_alive(*process_record)
    ]


def copy_logs(
    home: Path,
    name: str | None,
    step: str,
    follows_new_lines: bool,
    output_stream: TextIO,
    as_json: bool,
) -> str:
    """Copy the logs of a run to `output_stream`. With `follows_new_lines`, continue to copy new
    lines until the runner of the run exits. Return a hint for the user if the run is not finished
    or has printed nothing, else "".

    If `name` is not a run, but a step of the newest run, copy the logs of this step.
    """
    newest_names = list_run_names(home)
    if name and not step and newest_names and name not in newest_names:
        with suppress(ConfigError):
            # if the step does not exist either, the error below names the missing run
            check_step(newest_names[0], name, RunFiles(home, newest_names[0]).workflow())
            step = name
            name = newest_names[0]

    name = name or find_newest(home)
    run_files = RunFiles(home, name)
    manifest = run_files.workflow()
    # the user may pass the name of a pod, which starts with the name of the run
    step = step.removeprefix(f"{name}-")

    check_step(
        name,
        step,
        manifest,
        [path.stem.removeprefix(f"{name}-") for path in run_files.logs.glob("*.log")],
    )

    has_lines = display.follow(
        run_files.logs,
        name,
        step,
        lambda: not follows_new_lines or run_files.runner() is None,
        output_stream,
        as_json,
    )

    hint_by_phase = {
        "Interrupted": (
            f"{name} was interrupted, so its logs are incomplete: "
            f"`{program.name} resume {name}` continues it."
        ),
        "Running": f"{name} is running: `{program.name} logs {name} -f` follows its logs.",
    }

    silence_hint = "" if has_lines else f"{step or name} has printed nothing."

    return hint_by_phase.get(load_status(home, name)["phase"], silence_hint)


def _list_runs(home: Path) -> Iterator[tuple[str, Status]]:
    """Yield name and status of all runs, newest first. A run with unreadable files has the phase
    Unreadable."""
    for name in list_run_names(home):
        try:
            yield name, load_status(home, name)
        except ConfigError:
            yield name, {"phase": "Unreadable"}


def make_run_row(name: str, status: Status, phase: str, created: str | None) -> dict[str, str]:
    """Return the row of a run in the table of runs."""
    start_time = status.get("startedAt")
    end_time = status.get("finishedAt")
    row = {"run": name, "phase": phase, "age": "", "took": ""}
    if created:
        row["age"] = format_duration(time.time() - parse_timestamp(created))
    if start_time and end_time:
        row["took"] = format_duration(parse_timestamp(end_time) - parse_timestamp(start_time))

    return row


def show_tables(tables: dict[str, list[dict[str, Any]]], as_json: bool, text_if_empty: str) -> str:
    """Return the tables as text, or as one JSON object. `text_if_empty`: text to return if all
    tables are empty."""
    if as_json:
        return to_json(tables, indent=2)
    return "\n\n".join(format_table(rows) for rows in tables.values() if rows) or text_if_empty


def format_table(rows: list[dict[str, Any]]) -> str:
    """Format rows as columns with headers, like `kubectl get`."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cell_lines = [
        [column_name.upper() for column_name in columns],
        *[[_format_cell(row.get(column_name, "")) for column_name in columns] for row in rows],
    ]
    widths = [max(map(len, column)) for column in zip(*cell_lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell_text:{column_width}}"
            for cell_text, column_width in zip(cell_line, widths, strict=True)
        ).rstrip()
        for cell_line in cell_lines
    )


def _format_cell(value: object) -> str:
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    return escape_to_one_line(str(value))
