"""The tab `training`: the lost time of each training with the reasons, the workers as lanes, the
generations (groups of workers) and checkpoints, and the jobs of other frameworks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from argolocal.common.wording import format_duration
from argolocal.page.sources import Run
from rekindle.errors import ConfigError, RekindleError
from rekindle.page.tabs.charts import LineChart, Series, Tick, time_ticks
from rekindle.page.tabs.records import LedgerTab
from rekindle.training.ledger.ledger_summary import (
    LOST_KIND,
    TRAINED_KIND,
    WAITED_KIND,
    Incident,
    LedgerSummary,
    TimeInterval,
    format_percent,
    shorten_worker_name,
)

if TYPE_CHECKING:
    from rekindle.view.explain import RunCosts

MAX_LANES = 60
# maximum number of intervals in a worker's lane; the shortest intervals are merged
MAX_SPANS = 400
# maximum number of event marks in a worker's lane
MAX_MARKS = 60
# maximum number of rows in the tables of generations and checkpoints
MAX_ROWS = 100
SPEED_POINTS = 200
# state in a ledger → state as the page shows it
STATES = {"running": "running", "complete": "succeeded", "failed": "failed"}
# kind of an event → words in the legend
SIGNS = {
    "joined": "joined",
    "lost": "worker lost",
    "preempted": "left on request",
    "failed": "failed",
    "restored": "state restored",
    "checkpoint": "durable checkpoint",
}
# the kinds of intervals in order of importance: a merged interval has the most important kind of
# its parts
KINDS = (LOST_KIND, WAITED_KIND, TRAINED_KIND)


@dataclass(frozen=True)
class Span:
    """An interval of a worker, in seconds since the start of the training. `kind`: trained, waited
    or lost."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Mark:
    """An event of a worker. `kind`: joined, lost, preempted, failed, restored."""

    second: float
    kind: str
    text: str

    @property
    def full_text(self) -> str:
        return f"{self.text}, {format_duration(self.second)} after the start"


@dataclass(frozen=True)
class Lane:
    """The lane of a worker: its seconds by kind, its intervals and its events. `queued_s`: seconds
    until the worker was alive; `note`: "harvested" for an extra worker on idle capacity,
    "on demand" for a worker that has replaced a worker on a spot node."""

    worker: str
    trained_s: float
    waited_s: float
    lost_s: float
    queued_s: float
    note: str
    spans: list[Span]
    marks: list[Mark]


@dataclass(frozen=True)
class Generation:
    """A group of workers that trained together. `second`: start of the group, in seconds since the
    start of the training."""

    number: int
    second: float
    members: int
    step: int


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint. `seconds`: time to write it in the background."""

    second: float
    step: int
    seconds: float
    bytes: int

    @property
    def text(self) -> str:
        return (
            f"durable checkpoint of step {self.step}, {format_duration(self.second)} after the"
            f" start, written in {format_duration(self.seconds)}"
        )

    @property
    def size(self) -> str:
        return f"{self.bytes / 1e6:.3g} MB"


@dataclass(frozen=True)
class Training:
    """A training, read from its ledger. `began` is the Unix time of the start; all other times are
    seconds since `began`.

    `hidden_lanes`: number of workers that are not in `lanes`. `reused`: the task (RUN/TASK) whose
    model this run reuses instead of training one.
    """

    task: str
    state: str
    losses: str
    words: list[str]
    began: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    total_steps: int | None = None
    unit: str = "steps"
    steps_per_second: float = 0.0
    steps_repeated: int = 0
    worker_seconds_lost: float = 0.0
    workers_lost: int = 0
    workers_preempted: int = 0
    lanes: list[Lane] | None = None
    hidden_lanes: int = 0
    generations: list[Generation] | None = None
    checkpoints: list[Checkpoint] | None = None
    speed: LineChart | None = None
    reused: str = ""

    @property
    def ticks(self) -> list[Tick]:
        return time_ticks(0.0, self.seconds or 1.0)

    @property
    def signs(self) -> dict[str, str]:
        """The kinds of events in the lanes, each with its meaning."""
        kinds = {mark.kind for lane in self.lanes or [] for mark in lane.marks}
        if self.checkpoints:
            kinds.add("checkpoint")
        return {kind: words for kind, words in SIGNS.items() if kind in kinds}

    def percent(self, second: float) -> float:
        """Convert a time to a percentage of the training's duration."""
        return round(100 * second / (self.seconds or 1.0), 3)


@dataclass(frozen=True)
class Job:
    """A job of another framework. Of such a job, only the state and times of its step are known."""

    task: str
    kind: str
    pods: Mapping[str, int]
    phase: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Trainings:
    """The trainings and jobs of a run. `problem`: sentence that says why the ledgers cannot be
    read, or ""."""

    trainings: list[Training]
    jobs: list[Job]
    problem: str = ""


class TrainingTab(LedgerTab):
    """The tab `training`."""

    name = "training"
    title = "Training"
    content = Trainings

    def build(self, run: Run, query: Mapping[str, str]) -> Trainings:
        from rekindle.view.explain import RunCosts

        if not self.is_shown(run):
            return Trainings([], [])

        costs = RunCosts(run.name, run.manifest, run.status)
        tasks = self.records.facts(run).trainings
        try:
            trainings = [self._training(run, task, costs) for task in tasks]
            problem = ""
        except ConfigError as error:
            trainings = []
            problem = str(error)
        except RekindleError as error:
            trainings = []
            problem = f"The ledgers of the training cannot be read now: {error}"
        return Trainings(trainings, _list_jobs(costs), problem)

    def _training(self, run: Run, task: str, costs: "RunCosts") -> Training:
        from rekindle.training.cost.bill import build_report

        summary = self.records.summary(run.name, task)
        if not summary.intervals:
            return self._untrained(run, task)

        words = build_report(summary, costs.tariffs.get(task))["words"]
        # if a run was killed, the state in its ledger is still `running`
        has_stopped = summary.state == "running" and run.is_finished
        state = "interrupted" if has_stopped else STATES[summary.state]
        return describe_training(task, summary, words, state)

    def _untrained(self, run: Run, task: str) -> Training:
        source = self.records.reused(run).get(task, "")
        if source:
            earlier_run = source.partition("/")[0]
            untrained_reason = f"This run did not train: it uses the model of {earlier_run}."
            return Training(task, "cached", untrained_reason, [], reused=source)

        if run.is_finished:
            return Training(task, "omitted", "No worker has trained.", [])
        return Training(task, "waiting", "No worker has trained yet.", [])


def describe_training(
    task: str, summary: LedgerSummary, description_words: list[str], training_state: str
) -> Training:
    """Return a training, as the summary of its ledger describes it. If the training has too many
    workers to show, the workers with the most events are shown."""
    lanes = [_make_lane(name, summary) for name in sorted(summary.intervals, key=_natural_order)]
    if len(lanes) > MAX_LANES:
        ranked = sorted(lanes, key=lambda lane: -len(lane.marks))[:MAX_LANES]
        shown = [lane for lane in lanes if lane in ranked]
    else:
        shown = lanes

    total_steps = summary.run.get("steps")
    return Training(
        task=task,
        state=training_state,
        losses=describe_losses(summary),
        words=description_words,
        began=summary.began,
        seconds=round(summary.ended - summary.began, 3),
        steps=summary.steps,
        total_steps=total_steps if isinstance(total_steps, int) else None,
        unit=summary.unit,
        steps_per_second=round(summary.steps_per_second, 3),
        steps_repeated=summary.repeated,
        worker_seconds_lost=round(summary.compute_worker_seconds(LOST_KIND), 3),
        workers_lost=summary.count_incidents("lost"),
        workers_preempted=summary.count_incidents("drain"),
        lanes=shown,
        hidden_lanes=len(lanes) - len(shown),
        generations=_list_generations(summary),
        checkpoints=[_make_checkpoint(event, summary) for event in summary.checkpoints],
        speed=_make_speed_chart(summary),
    )


def describe_losses(summary: LedgerSummary) -> str:
    """Return a sentence with the lost worker-seconds of a training and the reasons for the loss."""
    from rekindle.training.ledger.sentences import LOSS_REASONS, format_worker_time

    losses = [incident for incident in summary.incidents if incident.kind == "lost"]
    failures = summary.count_incidents("failed")
    preempted = summary.count_incidents("drain")

    reasons = Counter(LOSS_REASONS.get(loss.why, loss.why) or "unknown" for loss in losses)
    causes: list[str] = []
    if losses:
        reason_text = ", ".join(
            reason if count == 1 else f"{count} times {reason}"
            for reason, count in reasons.most_common()
        )
        causes.append(
            f"{_format_count(len(losses), 'worker was', 'workers were')} lost ({reason_text})"
        )
    if preempted:
        causes.append(f"{_format_count(preempted, 'worker', 'workers')} left on request")
    if failures:
        causes.append(f"{_format_count(failures, 'worker has', 'workers have')} failed")

    restarts = summary.count_incidents("coordinator")
    if restarts:
        causes.append(f"the coordinator restarted {_format_count(restarts, 'time', 'times')}")

    total = sum(summary.compute_worker_seconds(kind) for kind in KINDS) or 1.0
    lost = summary.compute_worker_seconds(LOST_KIND)
    if not lost and not summary.repeated:
        if causes:
            return f"No work was lost, although {' and '.join(causes)}."
        return "Nothing was lost: all workers trained from their start to the end."

    amount = f"{format_worker_time(lost, summary)} of work ({format_percent(lost / total)})"
    if summary.repeated:
        unit = summary.unit[:-1] if summary.repeated == 1 else summary.unit
        amount += f" and {summary.repeated} {unit}, which were repeated,"
    reason = f", because {' and '.join(causes)}" if causes else ""
    return f"{amount} were lost{reason}.".replace(",,", ",")


def _format_count(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def _natural_order(worker_name: str) -> tuple[int, str]:
    """Return a sort key that places worker-10 after worker-9."""
    return len(worker_name), worker_name


def _make_lane(worker_name: str, summary: LedgerSummary) -> Lane:
    began = summary.began
    intervals = summary.intervals[worker_name]
    marks = _list_joins(intervals, began)
    marks += [
        _make_mark(incident, began)
        for incident in summary.incidents
        if incident.name == worker_name and incident.kind not in ("join", "coordinator")
    ]
    marks += [
        Mark(
            round(event["t"] - began, 3),
            "restored",
            f"{summary.unit[:-1]} {event.get('step')} was restored from"
            f" {_describe_restore_source(event)}",
        )
        for event in summary.restored
        if event.get("name") == worker_name and event.get("tier") not in ("none", None)
    ]
    marks.sort(key=lambda mark: mark.second)

    seconds = {kind: round(summary.compute_worker_seconds(kind, worker_name), 3) for kind in KINDS}
    return Lane(
        shorten_worker_name(worker_name),
        seconds[TRAINED_KIND],
        seconds[WAITED_KIND],
        seconds[LOST_KIND],
        round(summary.queued_by_worker.get(worker_name, 0.0), 3),
        summary.describe_worker_kind(worker_name),
        _merge_intervals(intervals, began, summary.ended),
        marks[:MAX_MARKS],
    )


def _describe_restore_source(event: Mapping[str, Any]) -> str:
    from rekindle.training.ledger.sentences import RESTORE_SOURCES

    return RESTORE_SOURCES.get(str(event.get("tier")), str(event.get("tier")))


def _list_joins(intervals: list[TimeInterval], began: float) -> list[Mark]:
    """Return a mark for each time at which a worker joined. A worker joins at the start of each
    interval that does not directly follow another interval."""
    first_intervals = intervals[:1] + [
        later for earlier, later in pairwise(intervals) if later.start > earlier.end
    ]
    return [
        Mark(round(interval.start - began, 3), "joined", "joined" if index == 0 else "joined again")
        for index, interval in enumerate(first_intervals)
    ]


def _make_mark(incident: Incident, began: float) -> Mark:
    from rekindle.training.ledger.sentences import LOSS_REASONS

    reason = LOSS_REASONS.get(incident.why, incident.why)
    if incident.kind == "lost":
        kind = "lost"
        text = f"lost: {reason}"
    elif incident.kind == "drain":
        kind = "preempted"
        text = "left on request, as before a preemption"
    else:
        kind = "failed"
        text = f"failed: {incident.why}"

    if incident.step:
        text += f", at step {incident.step}"
    if incident.repeated:
        text += f"; {_format_count(incident.repeated, 'step was', 'steps were')} repeated"
    if incident.back is not None:
        text += f"; back after {format_duration(incident.back - incident.t)}"
    return Mark(round(incident.t - began, 3), kind, text)


def _merge_intervals(intervals: list[TimeInterval], began: float, ended: float) -> list[Span]:
    """Return the intervals to draw in a lane. Merge intervals that are too short to see; a merged
    interval gets the most important of their kinds."""
    shortest = (ended - began) / MAX_SPANS if len(intervals) > MAX_SPANS else 0.0
    spans: list[Span] = []
    for interval in intervals:
        start = round(interval.start - began, 3)
        end = round(interval.end - began, 3)
        last_span = spans[-1] if spans else None
        if (
            last_span
            and last_span.end - last_span.start < shortest
            and start - last_span.end < shortest
        ):
            interval_kind = min(last_span.kind, interval.kind, key=KINDS.index)
            spans[-1] = Span(last_span.start, end, interval_kind)
        elif last_span and last_span.kind == interval.kind and start <= last_span.end:
            spans[-1] = Span(last_span.start, end, last_span.kind)
        elif end > start:
            spans.append(Span(start, end, interval.kind))
    return spans


def _list_generations(summary: LedgerSummary) -> list[Generation]:
    began = summary.began
    return [
        Generation(number, round(t - began, 3), members, step)
        for number, (t, members, step) in enumerate(summary.groups, 1)
    ]


def _make_checkpoint(event: Mapping[str, Any], summary: LedgerSummary) -> Checkpoint:
    return Checkpoint(
        round(event["t"] - summary.began, 3),
        int(event.get("step", 0)),
        float(event.get("seconds", 0.0)),
        int(event.get("bytes", 0)),
    )


def _make_speed_chart(summary: LedgerSummary) -> LineChart | None:
    """Return the steps per second over time; None for a training with too few steps."""
    length = summary.ended - summary.began
    if len(summary.points) < 3 or length <= 0:
        return None

    count = int(max(2, min(SPEED_POINTS, length)))
    rates = [0.0] * count
    for (start, first), (end, last) in pairwise(summary.points):
        if last > first and end > start:
            _distribute_steps(
                rates,
                (start - summary.began) / length,
                (end - summary.began) / length,
                last - first,
            )

    width = length / count
    points = [(round((i + 0.5) * width, 3), round(rate / width, 4)) for i, rate in enumerate(rates)]
    unit = f"{summary.unit} per second"
    # the chart has the same time axis as the lanes above the chart
    series = [Series(unit, points)]
    return LineChart(unit.capitalize(), "s", series, x_range=(0.0, summary.ended - summary.began))


def _distribute_steps(rates: list[float], start: float, end: float, steps: int) -> None:
    """Distribute the steps of a period over the time slices in `rates`. `start`, `end`: fractions
    of the total time."""
    count = len(rates)
    first = min(count - 1, int(start * count))
    last = min(count - 1, int(end * count))
    for index in range(first, last + 1):
        overlap = min(end, (index + 1) / count) - max(start, index / count)
        rates[index] += steps * max(0.0, overlap) / (end - start)


def _list_jobs(costs: "RunCosts") -> list[Job]:
    from rekindle.view.explain import build_job_report

    reports = [build_job_report(job, costs.prices) for job in costs.jobs]
    return [
        Job(
            report["task"],
            report["kind"],
            report["pods"],
            report["phase"],
            report["seconds"],
            report["words"][0],
        )
        for report in reports
    ]
