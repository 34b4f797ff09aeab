"""The list of runs: one row for each run, filtered by text, state and columns such as the model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock, Thread

from argolocal.common import causes
from argolocal.engine.suspend import list_suspended_nodes
from argolocal.errors import FORM_ERRORS, ArgolocalError, ConfigError
from argolocal.page.failure import describe_failure
from argolocal.page.log_files import LogFile
from argolocal.page.sources import Run, RunSource, describe_malformed
from argolocal.runner.rerun import make_name_prefix
from argolocal.view import summary
from argolocal.view.summary import FINISHED_PHASES, Step, parse_timestamp

# phases of finished steps that do not count as done
NOT_DONE = {"Failed", "Error", "Omitted"}

ROWS_PER_PAGE = 100
# state of a run in the list → phases of a run in this state
STATES = {
    "running": ("Running", "Pending"),
    "waiting": ("Waiting",),
    "succeeded": ("Succeeded",),
    "failed": ("Failed", "Error"),
    "interrupted": ("Interrupted",),
    "unreadable": ("Unreadable",),
}


@dataclass(frozen=True)
class RunRow:
    """One run in the list. `started` and `finished`: times in the format of RFC 3339. `done`,
    `total`: number of finished steps and number of all steps, of the steps that are not part of
    another step."""

    name: str
    pipeline: str
    state: str
    message: str = ""
    """Failed step and cause of the failure."""
    started: str | None = None
    finished: str | None = None
    seconds: float | None = None
    done: int = 0
    total: int = 0
    progress: str = ""
    """Progress of the running step, such as the training step and the loss."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Additional columns: title → text."""


@dataclass(frozen=True)
class Filter:
    """A filter of the list by the values of one column, such as the model. `name`: query parameter
    in the URL. `title`: title of the column. `selected`: value by which the list is filtered, or
    ""."""

    name: str
    title: str
    choices: list[str]
    selected: str


@dataclass(frozen=True)
class RunList:
    """One page of the list of runs. `count`: number of runs on all pages. `text`: text that each
    run must contain. `pages`: number of pages. `columns`: titles of the additional columns."""

    rows: list[RunRow]
    count: int
    text: str
    state: str
    page: int
    pages: int
    states: list[str]
    columns: list[str]
    filters: list[Filter] = field(default_factory=list)


# function that returns the logs of a run by pod; argument: name of the run
ReadLogs = Callable[[str], Mapping[str, LogFile]]


class RowReader:
    """Creates the row of a run. Subclasses add columns.

    `read_logs`: function that returns the logs of a run; the logs are searched for the cause of a
    failure.
    """

    filters: tuple[str, ...] = ()
    """Titles of the columns by which users can filter the list."""

    def __init__(self, read_logs: ReadLogs = lambda run: {}) -> None:
        self.read_logs = read_logs

    def pipeline(self, run: Run) -> str:
        """Return the pipeline of a run: the name of the workflow without its random suffix."""
        return make_name_prefix(run.manifest).rstrip("-")

    def facts(self, run: Run) -> Mapping[str, str]:
        """Return the texts in the additional columns of the list: title → text."""
        return {}

    def progress(self, name: str, running_steps: Sequence[Step]) -> str:
        """Return the progress of a running step of a run, or ""."""
        return next(filter(None, map(summary.describe_progress, running_steps)), "")

    def row(self, run: Run) -> RunRow:
        """Return the row of a run, with the current progress of its steps."""
        steps = _list_steps(run)
        row = self.make_row(run, steps)
        return replace(row, progress=self.progress(run.name, _running(steps)))

    def make_row(self, run: Run, steps: Sequence[Step]) -> RunRow:
        """Return the row of a run that consists of `steps`, without the progress of running
        steps."""
        message = causes.extract_cause(summary.find_run_message(run.name, run.status))
        if state_of(run) == "failed":
            message = describe_failure(run, self.read_logs(run.name))
        return make_row(run, steps, self.pipeline(run), message, self.facts(run))


@dataclass(frozen=True)
class _CachedRow:
    version: str
    row: RunRow
    running_steps: Sequence[Step] = ()


def state_of(run: Run) -> str:
    """Return the state of a run as a key of STATES."""
    if run.phase == "Running" and (
        run.spec.get("suspend") or next(iter(list_suspended_nodes(run.status)), None)
    ):
        return "waiting"
    return next((state for state, phases in STATES.items() if run.phase in phases), "running")


def make_row(
    run: Run, steps: Sequence[Step], pipeline: str, message: str, facts: Mapping[str, str]
) -> RunRow:
    """Return the row of a run that consists of `steps`."""
    status = run.status
    top_steps = [step for step in steps if step.depth == 0]
    start = status.get("startedAt")
    end = status.get("finishedAt")

    seconds = None
    if start and end:
        seconds = round(parse_timestamp(end) - parse_timestamp(start), 3)

    return RunRow(
        name=run.name,
        pipeline=pipeline,
        state=state_of(run),
        message=message,
        started=run.created,
        finished=end,
        seconds=seconds,
        done=sum(step.phase in FINISHED_PHASES - NOT_DONE for step in top_steps),
        total=len(top_steps),
        facts=facts,
    )


def _list_steps(run: Run) -> list[Step]:
    return summary.list_steps(run.name, run.status, summary.list_planned_tasks(run.manifest))


def _running(steps: Iterable[Step]) -> list[Step]:
    return [step for step in summary.list_leaf_steps(steps) if step.phase == "Running"]


class RunRows:
    """The rows of all runs of a source. A row is computed again only if its run has changed.

    Without a filter, `find` computes only the rows on the shown page, so that the first page
    appears quickly. While the first page is shown, a thread computes the other rows.
    """

    def __init__(self, source: RunSource, reader: RowReader) -> None:
        self.source = source
        self.reader = reader
        self.rows: dict[str, _CachedRow] = {}
        self.lock = Lock()
        self.is_filling = False

    def find(self, query: Mapping[str, str]) -> RunList:
        """Return the rows that match the query parameters of a URL, which are `q`, `state`, `page`,
        and the titles of the reader's filters in lower case."""
        text = query.get("q", "").strip()
        state = query.get("state", "")
        if state and state not in STATES:
            raise ConfigError(f'the state is "{state}": it must be one of {", ".join(STATES)}.')

        names = self.source.names()
        for removed_name in self.rows.keys() - set(names):
            self.rows.pop(removed_name, None)

        selected = {title: query.get(title.lower(), "") for title in self.reader.filters}
        is_filtered = bool(text or state or any(selected.values()))
        if is_filtered:
            names = [row.name for row in self.all(names) if _matches(row, text, state, selected)]

        pages = max(1, -(-len(names) // ROWS_PER_PAGE))
        number = query.get("page", "1")
        page = min(pages, max(1, int(number))) if number.isdecimal() and len(number) < 9 else 1
        shown_names = names[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE]

        rows = [self._row_with_progress(name) for name in shown_names]
        if not is_filtered and len(names) > len(rows):
            self._fill(names)

        # leave out a column that only repeats the pipeline's name, such as a model with the same
        # name
        columns = dict.fromkeys(
            title
            for row in rows
            for title, value in row.facts.items()
            if value not in ("", row.pipeline)
        )
        filters = [self._make_filter(title, value) for title, value in selected.items()]
        return RunList(
            rows, len(names), text, state, page, pages, list(STATES), list(columns), filters
        )

    def all(self, names: Sequence[str] | None = None) -> list[RunRow]:
        """Return the rows of all runs, newest first, without the progress of running steps."""
        return [self._row(name).row for name in (names or self.source.names())]

    def version(self) -> str:
        """Return a text that changes whenever a row or the progress of a running step changes."""
        versions = []
        for name in self.source.names():
            versions.append(f"{name}={self.source.version(name)}")
            cached_row = self.rows.get(name)
            if cached_row and cached_row.running_steps:
                versions.append(self.reader.progress(name, cached_row.running_steps))
        return "/".join(versions)

    def _make_filter(self, title: str, selected: str) -> Filter:
        """Return the filter of a column. The choices of the filter are the values in the computed
        rows."""
        values = {cached.row.facts.get(title, "") for cached in list(self.rows.values())}
        choices = sorted(filter(None, values | {selected}))
        return Filter(title.lower(), title, choices, selected)

    def _fill(self, names: Sequence[str]) -> None:
        """Start a thread that computes the rows that are not in memory."""
        with self.lock:
            if self.is_filling or all(name in self.rows for name in names):
                return
            self.is_filling = True

        def fill() -> None:
            try:
                self.all(names)
            finally:
                self.is_filling = False

        Thread(target=fill, name="rows", daemon=True).start()

    def _row_with_progress(self, name: str) -> RunRow:
        cached_row = self._row(name)
        if not cached_row.running_steps:
            return cached_row.row
        progress = self.reader.progress(name, cached_row.running_steps)
        return replace(cached_row.row, progress=progress)

    def _row(self, name: str) -> _CachedRow:
        """Return the row of a run, computed again if the run has changed."""
        version = self.source.version(name)
        cached_row = self.rows.get(name)
        if cached_row and cached_row.version == version:
            return cached_row

        try:
            run = self.source.read(name)
            steps = _list_steps(run)
            row = self.reader.make_row(run, steps)
            cached_row = _CachedRow(run.version, row, [] if run.is_finished else _running(steps))
        except ArgolocalError as error:
            cached_row = _CachedRow(version, RunRow(name, "", "unreadable", str(error)))
        except FORM_ERRORS as error:
            message = describe_malformed(name, error)
            cached_row = _CachedRow(version, RunRow(name, "", "unreadable", message))

        self.rows[name] = cached_row
        return cached_row


def _matches(row: RunRow, text: str, state: str, selected: Mapping[str, str]) -> bool:
    """Return True if a row contains `text` and has the state and the column values that the user
    has selected."""
    if state and row.state != state:
        return False
    if any(value and row.facts.get(title) != value for title, value in selected.items()):
        return False

    words = [row.name, row.pipeline, row.state, row.message, *row.facts.values()]
    return text.lower() in " ".join(words).lower()
