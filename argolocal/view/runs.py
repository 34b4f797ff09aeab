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
from argolocal.common.wording import format_duration, one_line, visible
from argolocal.engine.suspend import suspended
from argolocal.errors import ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.state.journal import MANIFEST_FILE, RunFiles
from argolocal.view import display, summary
from argolocal.view.summary import (
    FINISHED,
    Status,
    Step,
    check_step,
    named_warnings,
    steps,
    timestamp,
)

QUEUED_MESSAGE = "Waiting for a place in the queue of `{} server`"
# function that returns the row of a run in the table of runs; arguments: name, status, phase,
# creation time
MakeRow = Callable[[str, Status, str, str | None], dict[str, str]]


def run_names(home: Path) -> list[str]:
    """Return the names of the runs in a home, newest first."""
    files = [run.root / MANIFEST_FILE for run in RunFiles.all(home)]
    return [
        path.parent.name
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    ]


def find_newest(home: Path, phases: Collection[str] = ()) -> str:
    """Return the name of the newest run. If `phases` are given, only runs in these phases count.
    Raises ConfigError."""
    for name, status in _runs(home):
        if not phases or status["phase"] in phases:
            return name
    missing = f"run that is {' or '.join(phases).lower()}" if phases else "run"
    raise ConfigError(
        f"there is no {missing} in {home}: `{program.name} status` lists all runs, `{program.name}"
        " run` starts a run."
    )


def find_resumable(home: Path) -> str:
    """Return the name of the newest run that is suspended, interrupted or failed. Raises
    ConfigError."""
    phases = ("Interrupted", "Failed", "Error")
    for name, status in _runs(home):
        if status["phase"] in phases or (
            status["phase"] == "Running" and _is_suspended(home, name, status)
        ):
            return name
    return find_newest(home, (*phases, "Suspended"))


def _is_suspended(home: Path, name: str, status: Status) -> bool:
    return bool(
        next(iter(suspended(status)), None)
        or RunFiles(home, name).workflow()["spec"].get("suspend")
    )


def load_status(home: Path, name: str) -> dict[str, Any]:
    """Return the status of a run. If its runner died, the phase is Interrupted. Raises ConfigError
    if the run does not exist."""
    files = RunFiles(home, name)
    files.workflow()
    status, _ = files.load()
    return settle_phase(status, files)


def settle_phase(status: dict[str, Any], files: RunFiles) -> dict[str, Any]:
    """Correct the phase in a status from the journal of a run: it is Interrupted if the runner
    died, and Pending if the run waits for the server."""
    if status.get("phase") in FINISHED:
        return status
    if files.runner():
        return {**status, "phase": "Running"}
    if not status.get("phase") and files.queue_entry.exists():
        return {**status, "phase": "Pending", "message": QUEUED_MESSAGE.format(program.name)}
    return {**status, "phase": "Interrupted"}


def show_all(cluster: LocalCluster, as_json: bool, make_row: MakeRow | None = None) -> str:
    """Return the tables of runs and Deployments. `make_row` creates the row of a run (default:
    run_row)."""
    make_row = make_row or run_row
    runs = [
        make_row(name, status, status["phase"], status.get("startedAt"))
        for name, status in _runs(cluster.home)
    ]
    tables = {"runs": runs, "serving": cluster.overview()}
    return show_tables(
        tables, as_json, f"no runs in {cluster.home} yet: `{program.name} run` starts a run"
    )


def show_run(home: Path, name: str, as_json: bool) -> str:
    """Return the status of one run, as a table of its steps or as a JSON object."""
    status = load_status(home, name)
    if as_json:
        return to_json(as_object(home, name, status), indent=2)
    return steps_table(name, status) + processes_table(processes(home, name))


def as_object(home: Path, name: str, status: Status) -> dict[str, Any]:
    """Return the object that `argolocal status NAME -o json` prints."""
    return summary.as_json(name, status) | {"processes": processes(home, name)}


def processes_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of live pods that is shown after the table of steps, or "" if no pods are
    live."""
    if rows:
        return f"\n\n{format_table(rows)}"
    return ""


def steps_table(name: str, status: Status, rows: list[Step] | None = None) -> str:
    """Return a table of the steps `rows` (default: all steps of a run) with their phases and
    durations."""
    shown_rows = [
        {
            "step": "  " * row.depth + row.label,
            "phase": row.phase,
            "took": format_duration(row.seconds),
            "message": " ".join(causes.extract_cause(row.message).split())[:80],
        }
        for row in (steps(name, status) if rows is None else rows)
    ]

    head = (
        f"{name}: {status.get('phase') or 'Pending'} {visible(summary.run_message(name, status))}"
    )
    warning_lines = [
        f"\nwarning: {visible(text)}"
        for text in named_warnings((status.get("nodes") or {}).values())
    ]

    return head.rstrip() + "\n\n" + format_table(shown_rows) + "".join(warning_lines)


def processes(home: Path, name: str) -> list[dict[str, Any]]:
    """Return the live pods of a run, each with the pid of its first process. When this process
    exits, the pod ends."""
    files = RunFiles(home, name)
    if not files.runner():
        return []

    status, records = files.load()
    record_of_pod = {
        status["nodes"][id]["displayName"]: record
        for id, record in records.items()
        if id in status["nodes"]
    }
    for path in sorted((files.root / "pids").glob("*")):
        # if a pod has just ended, its record may be deleted or incomplete
        with suppress(OSError, ValueError):
            record_of_pod[path.name.removeprefix(f"{name}-")] = json.loads(path.read_text())

    return [
        {"pod": pod, "pid": record[0]} for pod, record in record_of_pod.items() if is_alive(*record)
    ]


def copy_logs(
    home: Path, name: str | None, step: str, follow: bool, out: TextIO, as_json: bool
) -> str:
    """Copy the logs of a run to `out`. With `follow`, continue to copy new lines until the runner
    of the run exits. Return a hint for the user if the run is not finished or has printed nothing,
    else "".

    If `name` is not a run, but a step of the newest run, copy the logs of this step.
    """
    names = run_names(home)
    if name and not step and names and name not in names:
        with suppress(ConfigError):
            # if the step does not exist either, the error below names the missing run
            check_step(names[0], name, RunFiles(home, names[0]).workflow())
            step = name
            name = names[0]

    name = name or find_newest(home)
    files = RunFiles(home, name)
    manifest = files.workflow()
    # the user may pass the name of a pod, which starts with the name of the run
    step = step.removeprefix(f"{name}-")

    check_step(
        name,
        step,
        manifest,
        [path.stem.removeprefix(f"{name}-") for path in files.logs.glob("*.log")],
    )

    has_lines = display.follow(
        files.logs, name, step, lambda: not follow or files.runner() is None, out, as_json
    )

    reasons = {
        "Interrupted": (
            f"{name} was interrupted, so its logs are incomplete: "
            f"`{program.name} resume {name}` continues it."
        ),
        "Running": f"{name} is running: `{program.name} logs {name} -f` follows its logs.",
    }

    silence = "" if has_lines else f"{step or name} has printed nothing."

    return reasons.get(load_status(home, name)["phase"], silence)


def _runs(home: Path) -> Iterator[tuple[str, Status]]:
    """Yield name and status of all runs, newest first. A run with unreadable files has the phase
    Unreadable."""
    for name in run_names(home):
        try:
            yield name, load_status(home, name)
        except ConfigError:
            yield name, {"phase": "Unreadable"}


def run_row(name: str, status: Status, phase: str, created: str | None) -> dict[str, str]:
    """Return the row of a run in the table of runs."""
    start = status.get("startedAt")
    end = status.get("finishedAt")
    return {
        "run": name,
        "phase": phase,
        "age": format_duration(time.time() - timestamp(created)) if created else "",
        "took": format_duration(timestamp(end) - timestamp(start)) if start and end else "",
    }


def show_tables(tables: dict[str, list[dict[str, Any]]], as_json: bool, text_if_empty: str) -> str:
    """Return the tables as text, or as one JSON object. If all tables are empty, the text is
    `text_if_empty`."""
    if as_json:
        return to_json(tables, indent=2)
    return "\n\n".join(format_table(rows) for rows in tables.values() if rows) or text_if_empty


def format_table(rows: list[dict[str, Any]]) -> str:
    """Format rows as columns with headers, like `kubectl get`."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        [name.upper() for name in columns],
        *[[_cell(row.get(name, "")) for name in columns] for row in rows],
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    return one_line(str(value))
