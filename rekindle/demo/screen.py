"""Record a training under attack, and display it as a live picture on a terminal, else as plain
lines.

    with live_view(DemoRecording(...), sys.stdout) as view:
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

from argolocal.common.wording import format_duration, open_raw_stream
from argolocal.view.display import is_terminal

# character and style of each state of a process. If a process had several states during the time of
# a column of the timeline, the first of these states in the order of STYLE_OF_STATE is shown.
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
    and are None until the value is known."""

    # time of the attack in seconds since the start of the training
    seconds: float
    # description of the attack, such as "SIGKILL worker-1"
    description: str
    victims: tuple[str, ...]
    signal_number: int
    # the processes that got the signal
    pids: set[int]
    # newest training step before the attack
    step: int
    # number of groups of workers (generations) published before the attack
    group_count: int = 0
    # number of restored checkpoints before the attack
    resume_count: int = 0
    next_step_after_s: float | None = None
    # seconds until every victim has rejoined the training
    back_after_s: float | None = None
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
        """Return the consequences of the attack as text, such as `next step after 0.07 s, nothing
        lost; back after 0.6 s`."""
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
class DemoRun:
    """Progress of one training."""

    name: str
    workers: int
    # number of steps
    total: int
    # 0 before the start
    began: float = 0.0
    # 0 before the end
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

    def speed(self, start_time: float, end_time: float) -> float:
        """Return the training steps per second between two times."""
        if end_time > start_time:
            return (self._step_at(end_time) - self._step_at(start_time)) / (end_time - start_time)
        return 0.0

    def _step_at(self, moment: float) -> int:
        recorded_count = bisect_right(self.steps, moment, key=itemgetter(0))
        if recorded_count:
            return self.steps[recorded_count - 1][1]
        return 0


@dataclass
class DemoRecording:
    """The progress of both trainings, the history of each process's states, and the attacks."""

    undisturbed: DemoRun
    disturbed: DemoRun
    timelines: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # (start, state)
    attacks: list[AttackRecord] = field(default_factory=list)
    # description of the current phase of the demo
    activity: str = ""
    equal: bool | None = None

    def record_state(self, process_name: str, process_state: str) -> None:
        state_history = self.timelines.setdefault(process_name, [])
        if not state_history or state_history[-1][1] != process_state:
            state_history.append((time.monotonic(), process_state))

    @property
    def training(self) -> bool:
        """True if a worker has completed a training step since the last attack."""
        has_recovered = not self.attacks or self.attacks[-1].next_step_after_s is not None
        return has_recovered and "training" in self.states

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
        return {state_history[-1][1] for state_history in self.timelines.values()}

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
def live_view(recording: DemoRecording, output_stream: TextIO) -> Iterator[View]:
    """Display the recording during the `with` block: as a live picture on a terminal, else as plain
    lines."""
    if not is_terminal(output_stream):
        line_view = LineView(recording, output_stream)
        yield line_view
        line_view.tick()
        return

    rich_console = Console(file=open_raw_stream(output_stream), highlight=False)
    live_picture = LivePicture(recording, rich_console)
    with Live(
        get_renderable=live_picture.draw, console=rich_console, refresh_per_second=8
    ) as live_display:
        yield live_picture
        live_display.vertical_overflow = "visible"


class LineView:
    """Prints one line for each event of the demo, and one line every five seconds of training."""

    def __init__(self, recording: DemoRecording, output_stream: TextIO) -> None:
        self.recording = recording
        self.out = output_stream
        self.activity = ""
        self.last_write_time = time.monotonic()
        self.reported_attacks = 0
        self.finished_runs: list[DemoRun] = []
        self.is_conclusion_written = False

    def tick(self) -> None:
        demo_recording = self.recording
        if demo_recording.activity != self.activity:
            self.activity = demo_recording.activity
            self._write(self.activity)

        for attack_record in demo_recording.attacks[self.reported_attacks :]:
            if not (attack_record.settled or demo_recording.disturbed.ended):
                break

            self._write(
                f"{attack_record.seconds:5.1f} s  {attack_record.description} at step"
                f" {attack_record.step} → {attack_record.outcome()}"
            )
            self.reported_attacks += 1

        for demo_run in (demo_recording.undisturbed, demo_recording.disturbed):
            if demo_run.ended and demo_run not in self.finished_runs:
                self.finished_runs.append(demo_run)
                duration_text = format_duration(demo_run.seconds)
                self._write(
                    f"{demo_run.name}: {demo_run.step} steps in {duration_text}, sha256"
                    f" {demo_run.sha256}"
                )
            elif (
                demo_run.began
                and not demo_run.ended
                and time.monotonic() - self.last_write_time >= 5
            ):
                self._write(f"{demo_run.name}: step {demo_run.step}/{demo_run.total}")

        if demo_recording.equal is not None and not self.is_conclusion_written:
            self.is_conclusion_written = True
            self._write(summarize_attacks(demo_recording))
            self._write(describe_conclusion(demo_recording))

    def _write(self, line: str) -> None:
        self.last_write_time = time.monotonic()
        self.out.write(f"{line}\n")
        self.out.flush()


class LivePicture:
    """Draws both trainings, a timeline of every process, and a table of the last attacks."""

    def __init__(self, recording: DemoRecording, console: Console) -> None:
        self.recording = recording
        self.console = console

    def tick(self) -> None:
        """Do nothing at a tick, because the live picture is redrawn automatically."""

    def draw(self) -> Group:
        recording = self.recording
        screen_elements = list[Any]()

        if recording.activity and not recording.undisturbed.began:
            screen_elements.append(Text(recording.activity, "dim"))
        if recording.undisturbed.began:
            screen_elements.append(self._trainings_table())
        if recording.disturbed.began:
            screen_elements += [Text(), self._timelines_table(), Text(), self._attacks_table()]
        if recording.equal is not None:
            screen_elements += [Text(), self._conclusion()]

        return Group(*screen_elements)

    def _trainings_table(self) -> Table:
        trainings_table = Table.grid(padding=(0, 2))
        for demo_run in (self.recording.undisturbed, self.recording.disturbed):
            if not demo_run.began:
                trainings_table.add_row(Text(demo_run.name, "dim"))
                continue

            current_time = time.monotonic()
            if not demo_run.ended:
                steps_per_second = demo_run.speed(
                    max(demo_run.began, current_time - 2), current_time
                )
            else:
                steps_per_second = demo_run.step / demo_run.seconds

            progress_bar = ProgressBar(
                demo_run.total,
                demo_run.step,
                width=24,
                complete_style="cyan",
                finished_style="green",
            )
            trainings_table.add_row(
                Text(demo_run.name, "bold"),
                progress_bar,
                f"{demo_run.step:>{len(str(demo_run.total))}}/{demo_run.total}",
                f"{steps_per_second:3.0f} steps/s",
                Text(format_duration(demo_run.seconds), "dim"),
            )

        return trainings_table

    def _timelines_table(self) -> Table:
        demo_run = self.recording.disturbed
        column_count = max(20, min(self.console.width - 30, 100))
        time_spans = list(
            pairwise(
                demo_run.began + demo_run.seconds * span_edge / column_count
                for span_edge in range(column_count + 1)
            )
        )
        table = Table.grid(padding=(0, 2))

        for process_name, state_history in list(self.recording.timelines.items()):
            hit_times = [
                demo_run.began + attack_record.seconds
                for attack_record in self.recording.attacks
                if process_name in attack_record.victims
            ]

            column_styles = []
            for span_start, span_end in time_spans:
                if any(span_start <= hit_time < span_end for hit_time in hit_times):
                    column_styles.append(ATTACK_STYLE)
                else:
                    column_styles.append(
                        STYLE_OF_STATE[find_most_severe_state(state_history, span_start, span_end)]
                    )

            styled_runs = [
                ("".join(character for character, _ in same_style_columns), style)
                for style, same_style_columns in groupby(column_styles, itemgetter(1))
            ]
            last_state = state_history[-1][1]
            table.add_row(
                process_name,
                Text.assemble(*styled_runs),
                Text(last_state, STYLE_OF_STATE[last_state][1]),
            )

        span_speeds = [demo_run.speed(*time_span) for time_span in time_spans]
        top_speed = max([*span_speeds, 1e-9])
        line = "".join(
            BAR_CHARACTERS[min(8, round(8 * span_speed / top_speed))] for span_speed in span_speeds
        )
        table.add_row(
            Text("steps/s", "dim"), Text(line, "cyan"), Text(f"up to {top_speed:.0f}", "dim")
        )

        return table

    def _attacks_table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for column_title in ("", "attack", "at step", "next step", "lost", "back"):
            alignment = "left" if column_title in ("attack", "lost") else "right"
            table.add_column(column_title, justify=alignment, no_wrap=True)

        for attack_record in self.recording.attacks[-max(4, self.console.height - 24) :]:
            recovery_times = [
                f"[green]{recovery_seconds:.2f} s" if recovery_seconds is not None else "…"
                for recovery_seconds in (
                    attack_record.next_step_after_s,
                    attack_record.back_after_s,
                )
            ]
            if attack_record.next_step_after_s is None:
                lost_steps_text = "…"
            elif attack_record.lost_steps:
                lost_steps_text = f"[yellow]{attack_record.lost_steps}"
            else:
                lost_steps_text = "[green]nothing"

            attack_start = f"[dim]{attack_record.seconds:.1f} s"
            table.add_row(
                attack_start,
                attack_record.description,
                str(attack_record.step),
                recovery_times[0],
                lost_steps_text,
                recovery_times[1],
            )

        return table

    def _conclusion(self) -> Panel:
        recording = self.recording
        border_color = "green" if recording.equal else "red"
        trainings = (recording.undisturbed, recording.disturbed)
        name_width = max(len(demo_run.name) for demo_run in trainings)

        text = Text()
        for demo_run in trainings:
            text.append(f"{demo_run.name:{name_width}}  ").append(
                f"{demo_run.sha256}\n", f"bold {border_color}"
            )
        text.append(f"\n{summarize_attacks(recording)}\n\n").append(
            describe_conclusion(recording), f"bold {border_color}"
        )
        return Panel(
            text, box=box.HORIZONTALS, border_style=border_color, expand=False, padding=(1, 0)
        )


def find_most_severe_state(
    state_history: list[tuple[float, str]], start_time: float, end_time: float
) -> str:
    """Return the most severe state that a process had between two times."""
    initial_states = [
        process_state for state_start, process_state in state_history if state_start <= start_time
    ][-1:]
    states_seen = {
        "",
        *initial_states,
        *(
            process_state
            for state_start, process_state in state_history
            if start_time < state_start < end_time
        ),
    }
    return next(process_state for process_state in STYLE_OF_STATE if process_state in states_seen)


def summarize_attacks(recording: DemoRecording) -> str:
    """Return a summary of all attacks, such as `9 attacks; the next step after 0.07 s (median),
    2.90 s (longest); 0 steps lost`."""
    summary_parts = [f"{len(recording.attacks)} attacks"]
    recovery_times = recording.recoveries
    if recovery_times:
        longest_text = f"{max(recovery_times):.2f} s (longest)"
        summary_parts.append(
            f"the next step after {median(recovery_times):.2f} s (median), {longest_text}"
        )

    lost_steps = recording.lost_steps
    summary_parts.append(f"{lost_steps} step{'s' * (lost_steps != 1)} lost")
    return "; ".join(summary_parts)


def describe_conclusion(recording: DemoRecording) -> str:
    if recording.equal:
        return "EQUAL: the same weights, bit for bit"
    return "DIFFERENT: the weights are not the same"
