"""Record a training under attack, and display it as a live picture on a terminal, else as plain
lines.

    with live_view(Recording(...), sys.stdout) as view:
        ...                                 # update the recording
        view.tick()                         # often

Times are seconds of `time.monotonic()`.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import median
from typing import Any, Protocol, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from argolocal.common.wording import format_duration, without_escapes
from argolocal.view.display import is_terminal

# character and style of each state of a process. If a process had several states during the time of
# a column of the timeline, the first of them in this order is shown.
STYLE_OF_STATE = {
    "dead": ("╌", "red"),
    "stopped": ("╌", "magenta"),
    "recovering": ("━", "yellow"),
    "starting": ("╌", "dim"),
    "training": ("━", "green"),
    "serving": ("━", "cyan"),
    "done": (" ", "dim"),
    "": (" ", ""),
}
HEALTHY_STATES = {"training", "serving"}
ATTACK_STYLE = ("✖", "bold red")
BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"


@dataclass
class AttackRecord:
    """One attack and its consequences. The fields `..._after_s` are in seconds since the attack,
    and None until known."""

    seconds: float  # time of the attack in seconds since the start of the training
    description: str  # description of the attack, such as "SIGKILL worker-1"
    victims: tuple[str, ...]
    signal_number: int
    pids: set[int]  # the processes that got the signal
    step: int  # newest training step before the attack
    group_count: int = 0  # number of groups of workers (generations) published before the attack
    resume_count: int = 0  # number of restored checkpoints before the attack
    next_step_after_s: float | None = None
    back_after_s: float | None = None  # seconds until every victim has rejoined the training
    lost_steps: int = 0

    @property
    def settled(self) -> bool:
        """True if the training has continued and every victim has rejoined."""
        return self.next_step_after_s is not None and self.back_after_s is not None

    def as_object(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 3),
            "attack": self.description,
            "victims": list(self.victims),
            "step": self.step,
            "next_step_seconds": self.next_step_after_s and round(self.next_step_after_s, 3),
            "back_seconds": self.back_after_s and round(self.back_after_s, 3),
            "steps_lost": self.lost_steps,
        }

    def outcome(self) -> str:
        """Return the consequences of the attack as text: `next step after 0.07 s, nothing lost;
        back after 0.6 s`."""
        if self.next_step_after_s is None:
            return "…"

        text = f"next step after {self.next_step_after_s:.2f} s, "
        if self.lost_steps:
            text += f"{self.lost_steps} step{'s' * (self.lost_steps > 1)} lost"
        else:
            text += "nothing lost"
        if self.back_after_s is not None:
            text += f"; back after {self.back_after_s:.1f} s"

        return text


@dataclass
class Run:
    """Progress of one training."""

    name: str
    workers: int
    total: int
    began: float = 0.0
    ended: float = 0.0
    step: int = 0
    sha256: str = ""
    # (time, newest step) at each change of the newest step
    steps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        if self.began:
            return (self.ended or time.monotonic()) - self.began
        return 0.0

    def record_step(self, step: int) -> None:
        self.began = self.began or time.monotonic()
        if step > self.step:
            self.step = step
            self.steps.append((time.monotonic(), step))

    def finish(self, sha256: str) -> None:
        self.ended = time.monotonic()
        self.sha256 = sha256
        self.step = self.total

    def speed(self, since: float, until: float) -> float:
        """Return the steps per second between two times."""
        if until > since:
            return (self._step_at(until) - self._step_at(since)) / (until - since)
        return 0.0

    def _step_at(self, moment: float) -> int:
        count = bisect_right(self.steps, moment, key=itemgetter(0))
        if count:
            return self.steps[count - 1][1]
        return 0


@dataclass
class Recording:
    """The progress of both trainings, the history of each process's states, and the attacks."""

    undisturbed: Run
    disturbed: Run
    timelines: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # (start, state)
    attacks: list[AttackRecord] = field(default_factory=list)
    activity: str = ""  # description of the current phase of the demo
    equal: bool | None = None

    def record_state(self, process: str, state: str) -> None:
        history = self.timelines.setdefault(process, [])
        if not history or history[-1][1] != state:
            history.append((time.monotonic(), state))

    @property
    def training(self) -> bool:
        """True if a worker has trained since the last attack."""
        recovered = not self.attacks or self.attacks[-1].next_step_after_s is not None
        return recovered and "training" in self.states

    @property
    def healthy(self) -> bool:
        """True if every process has recovered from every attack."""
        return (
            self.training
            and self.states <= HEALTHY_STATES
            and all(attack.settled for attack in self.attacks)
        )

    @property
    def states(self) -> set[str]:
        return {history[-1][1] for history in self.timelines.values()}

    @property
    def recoveries(self) -> list[float]:
        return [
            attack.next_step_after_s
            for attack in self.attacks
            if attack.next_step_after_s is not None
        ]

    @property
    def lost_steps(self) -> int:
        return sum(attack.lost_steps for attack in self.attacks)


class View(Protocol):
    def tick(self) -> None: ...


@contextmanager
def live_view(recording: Recording, out: TextIO) -> Iterator[View]:
    """Display the recording during the `with` block: as a live picture on a terminal, else as plain
    lines."""
    if not is_terminal(out):
        lines = Lines(recording, out)
        yield lines
        lines.tick()
        return

    console = Console(file=without_escapes(out), highlight=False)
    picture = Picture(recording, console)
    with Live(get_renderable=picture.draw, console=console, refresh_per_second=8) as live:
        yield picture
        live.vertical_overflow = "visible"


class Lines:
    """Prints one line per event, and one line every five seconds of training."""

    def __init__(self, recording: Recording, out: TextIO) -> None:
        self.recording = recording
        self.out = out
        self.activity = ""
        self.written_at = time.monotonic()
        self.reported_attacks = 0
        self.finished: list[Run] = []
        self.is_over = False

    def tick(self) -> None:
        recording = self.recording
        if recording.activity != self.activity:
            self.activity = recording.activity
            self._write(self.activity)

        for attack in recording.attacks[self.reported_attacks :]:
            if not (attack.settled or recording.disturbed.ended):
                break

            self._write(
                f"{attack.seconds:5.1f} s  {attack.description} at step {attack.step} →"
                f" {attack.outcome()}"
            )
            self.reported_attacks += 1

        for run in (recording.undisturbed, recording.disturbed):
            if run.ended and run not in self.finished:
                self.finished.append(run)
                took = format_duration(run.seconds)
                self._write(f"{run.name}: {run.step} steps in {took}, sha256 {run.sha256}")
            elif run.began and not run.ended and time.monotonic() - self.written_at >= 5:
                self._write(f"{run.name}: step {run.step}/{run.total}")

        if recording.equal is not None and not self.is_over:
            self.is_over = True
            self._write(summary(recording))
            self._write(conclusion(recording))

    def _write(self, line: str) -> None:
        self.written_at = time.monotonic()
        self.out.write(f"{line}\n")
        self.out.flush()


class Picture:
    """Draws both trainings, a timeline of every process, and a table of the last attacks."""

    def __init__(self, recording: Recording, console: Console) -> None:
        self.recording = recording
        self.console = console

    def tick(self) -> None:
        """Do nothing, because the live picture is redrawn automatically."""

    def draw(self) -> Group:
        recording = self.recording
        elements = list[Any]()

        if recording.activity and not recording.undisturbed.began:
            elements.append(Text(recording.activity, "dim"))
        if recording.undisturbed.began:
            elements.append(self._trainings_table())
        if recording.disturbed.began:
            elements += [Text(), self._timelines_table(), Text(), self._attacks_table()]
        if recording.equal is not None:
            elements += [Text(), self._conclusion()]

        return Group(*elements)

    def _trainings_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for run in (self.recording.undisturbed, self.recording.disturbed):
            if not run.began:
                table.add_row(Text(run.name, "dim"))
                continue

            now = time.monotonic()
            if not run.ended:
                speed = run.speed(max(run.began, now - 2), now)
            else:
                speed = run.step / run.seconds

            bar = ProgressBar(
                run.total, run.step, width=24, complete_style="cyan", finished_style="green"
            )
            table.add_row(
                Text(run.name, "bold"),
                bar,
                f"{run.step:>{len(str(run.total))}}/{run.total}",
                f"{speed:3.0f} steps/s",
                Text(format_duration(run.seconds), "dim"),
            )

        return table

    def _timelines_table(self) -> Table:
        run = self.recording.disturbed
        columns = max(20, min(self.console.width - 30, 100))
        spans = list(
            pairwise(run.began + run.seconds * edge / columns for edge in range(columns + 1))
        )
        table = Table.grid(padding=(0, 2))

        for process, history in list(self.recording.timelines.items()):
            hits = [
                run.began + attack.seconds
                for attack in self.recording.attacks
                if process in attack.victims
            ]

            styles = []
            for start, end in spans:
                if any(start <= hit < end for hit in hits):
                    styles.append(ATTACK_STYLE)
                else:
                    styles.append(STYLE_OF_STATE[most_severe_state(history, start, end)])

            runs = [
                ("".join(sign for sign, _ in same), style)
                for style, same in groupby(styles, itemgetter(1))
            ]
            state = history[-1][1]
            table.add_row(process, Text.assemble(*runs), Text(state, STYLE_OF_STATE[state][1]))

        speeds = [run.speed(*span) for span in spans]
        top_speed = max([*speeds, 1e-9])
        line = "".join(BAR_CHARACTERS[min(8, round(8 * speed / top_speed))] for speed in speeds)
        table.add_row(
            Text("steps/s", "dim"), Text(line, "cyan"), Text(f"up to {top_speed:.0f}", "dim")
        )

        return table

    def _attacks_table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for title in ("", "attack", "at step", "next step", "lost", "back"):
            side = "left" if title in ("attack", "lost") else "right"
            table.add_column(title, justify=side, no_wrap=True)

        for attack in self.recording.attacks[-max(4, self.console.height - 24) :]:
            times = [
                f"[green]{took:.2f} s" if took is not None else "…"
                for took in (attack.next_step_after_s, attack.back_after_s)
            ]
            if attack.next_step_after_s is None:
                lost = "…"
            elif attack.lost_steps:
                lost = f"[yellow]{attack.lost_steps}"
            else:
                lost = "[green]nothing"

            start = f"[dim]{attack.seconds:.1f} s"
            table.add_row(start, attack.description, str(attack.step), times[0], lost, times[1])

        return table

    def _conclusion(self) -> Panel:
        recording = self.recording
        colour = "green" if recording.equal else "red"
        trainings = (recording.undisturbed, recording.disturbed)
        width = max(len(run.name) for run in trainings)

        text = Text()
        for run in trainings:
            text.append(f"{run.name:{width}}  ").append(f"{run.sha256}\n", f"bold {colour}")
        text.append(f"\n{summary(recording)}\n\n").append(conclusion(recording), f"bold {colour}")
        return Panel(text, box=box.HORIZONTALS, border_style=colour, expand=False, padding=(1, 0))


def most_severe_state(history: list[tuple[float, str]], since: float, until: float) -> str:
    """Return the most severe state that a process had between two times."""
    initial = [state for start, state in history if start <= since][-1:]
    seen = {"", *initial, *(state for start, state in history if since < start < until)}
    return next(state for state in STYLE_OF_STATE if state in seen)


def summary(recording: Recording) -> str:
    """Return a summary of all attacks, such as `9 attacks; the next step after 0.07 s (median),
    2.90 s (longest); 0 steps lost`."""
    facts = [f"{len(recording.attacks)} attacks"]
    times = recording.recoveries
    if times:
        longest = f"{max(times):.2f} s (longest)"
        facts.append(f"the next step after {median(times):.2f} s (median), {longest}")

    lost = recording.lost_steps
    facts.append(f"{lost} step{'s' * (lost != 1)} lost")
    return "; ".join(facts)


def conclusion(recording: Recording) -> str:
    if recording.equal:
        return "EQUAL: the same weights, bit for bit"
    return "DIFFERENT: the weights are not the same"
