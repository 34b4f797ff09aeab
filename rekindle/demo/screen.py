"""What happened to the workers of a training while somebody watched: the record, and two ways to show it.

    with on_screen(Show(...), sys.stdout) as view:
        ...                                 # change the show
        view.tick()                         # often

A picture that redraws itself on a terminal, plain lines anywhere else. Times are seconds of `time.monotonic()`.
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

from rekindle.view.display import is_terminal
from rekindle.view.summary import duration

# how a process in that state looks; the first ones win where a column holds several
LOOKS = {
    "dead": ("╌", "red"),
    "stopped": ("╌", "magenta"),
    "recovering": ("━", "yellow"),
    "starting": ("╌", "dim"),
    "training": ("━", "green"),
    "serving": ("━", "cyan"),
    "done": (" ", "dim"),
    "": (" ", ""),
}
WELL = {"training", "serving"}
HIT = ("✖", "bold red")
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Strike:
    """One attack and what came of it; a time is None until it is known, all count from the attack."""

    at: float  # seconds since the training began
    words: str  # "SIGKILL worker-1"
    victims: tuple[str, ...]
    number: int  # the signal
    pids: set[int]  # that it was sent to
    step: int  # the newest that was made before
    groups: int = 0  # published before
    resumed: int = 0  # times that a worker had found its state in a checkpoint before
    next_step: float | None = None
    back: float | None = None  # until all victims are counted again
    lost: int = 0

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.next_step is not None and self.back is not None

    def as_object(self) -> dict[str, Any]:
        told = {"seconds": round(self.at, 3), "attack": self.words, "victims": list(self.victims), "step": self.step}
        times = {"next_step_seconds": self.next_step, "back_seconds": self.back}
        return told | {name: value and round(value, 3) for name, value in times.items()} | {"steps_lost": self.lost}

    def outcome(self) -> str:
        """`next step after 0.07 s, nothing lost; back after 0.6 s`"""
        if self.next_step is None:
            return "…"
        lost = f"{self.lost} step{'s' * (self.lost > 1)} lost" if self.lost else "nothing lost"
        back = f"; back after {self.back:.1f} s" if self.back is not None else ""
        return f"next step after {self.next_step:.2f} s, {lost}{back}"


@dataclass
class Run:
    """One training: what is known of it now."""

    name: str
    workers: int
    total: int
    began: float = 0.0
    ended: float = 0.0
    step: int = 0
    sha256: str = ""
    steps: list[tuple[float, int]] = field(default_factory=list)  # (when, newest step), while it moves

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began if self.began else 0.0

    def saw(self, step: int) -> None:
        """The newest step is `step` now."""
        self.began = self.began or time.monotonic()
        if step > self.step:
            self.step = step
            self.steps.append((time.monotonic(), step))

    def over(self, sha256: str) -> None:
        """The model is there."""
        self.ended, self.sha256, self.step = time.monotonic(), sha256, self.total

    def speed(self, since: float, until: float) -> float:
        """Steps per second between two times."""
        return (self._step_at(until) - self._step_at(since)) / (until - since) if until > since else 0.0

    def _step_at(self, moment: float) -> int:
        before = bisect_right(self.steps, moment, key=itemgetter(0))
        return self.steps[before - 1][1] if before else 0


@dataclass
class Show:
    """The whole show."""

    calm: Run
    storm: Run
    lanes: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # (since when, state)
    strikes: list[Strike] = field(default_factory=list)
    doing: str = ""  # what happens before the first training
    equal: bool | None = None

    def saw(self, lane: str, state: str) -> None:
        """A process is in that state now."""
        history = self.lanes.setdefault(lane, [])
        if not history or history[-1][1] != state:
            history.append((time.monotonic(), state))

    @property
    def going(self) -> bool:
        """Whether somebody trains, also after the last attack."""
        recovered = not self.strikes or self.strikes[-1].next_step is not None
        return recovered and "training" in self.states

    @property
    def well(self) -> bool:
        """Whether everybody trains, and nobody is missed any more."""
        return self.going and self.states <= WELL and all(each.settled for each in self.strikes)

    @property
    def states(self) -> set[str]:
        """Those of the processes now."""
        return {history[-1][1] for history in self.lanes.values()}

    @property
    def recoveries(self) -> list[float]:
        return [each.next_step for each in self.strikes if each.next_step is not None]

    @property
    def lost(self) -> int:
        return sum(each.lost for each in self.strikes)


class View(Protocol):
    def tick(self) -> None: ...


@contextmanager
def on_screen(show: Show, out: TextIO) -> Iterator[View]:
    """The view that fits `out`."""
    if not is_terminal(out):
        lines = Lines(show, out)
        yield lines
        lines.tick()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out, highlight=False)
    picture = Picture(show, console)
    with Live(get_renderable=picture.drawn, console=console, refresh_per_second=8) as live:
        yield picture
        live.vertical_overflow = "visible"


class Lines:
    """A line for everything that is new, and one every five seconds of training."""

    def __init__(self, show: Show, out: TextIO) -> None:
        self.show, self.out = show, out
        self.doing, self.said_at, self.told = "", time.monotonic(), 0
        self.finished: list[Run] = []
        self.over = False

    def tick(self) -> None:
        show = self.show
        if show.doing != self.doing:
            self.doing = show.doing
            self._say(self.doing)
        while self.told < len(show.strikes) and (show.strikes[self.told].settled or show.storm.ended):
            each = show.strikes[self.told]
            self._say(f"{each.at:5.1f} s  {each.words} at step {each.step} → {each.outcome()}")
            self.told += 1
        for run in (show.calm, show.storm):
            if run.ended and run not in self.finished:
                self.finished.append(run)
                self._say(f"{run.name}: {run.step} steps in {duration(run.seconds)}, sha256 {run.sha256}")
            elif run.began and not run.ended and time.monotonic() - self.said_at >= 5:
                self._say(f"{run.name}: step {run.step}/{run.total}")
        if show.equal is not None and not self.over:
            self.over = True
            self._say(summary(show))
            self._say(verdict(show))

    def _say(self, line: str) -> None:
        self.said_at = time.monotonic()
        self.out.write(f"{line}\n")
        self.out.flush()


class Picture:
    """Both trainings, the life of every process, and the last attacks in words."""

    def __init__(self, show: Show, console: Any) -> None:
        self.show, self.console = show, console

    def tick(self) -> None:
        """It redraws itself."""

    def drawn(self) -> Any:
        """The picture now."""
        from rich.console import Group
        from rich.text import Text

        show, parts = self.show, list[Any]()
        if show.doing and not show.calm.began:
            parts.append(Text(show.doing, "dim"))
        if show.calm.began:
            parts.append(self._trainings())
        if show.storm.began:
            parts += [Text(), self._lanes(), Text(), self._strikes()]
        if show.equal is not None:
            parts += [Text(), self._verdict()]
        return Group(*parts)

    def _trainings(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for run in (self.show.calm, self.show.storm):
            if not run.began:
                table.add_row(Text(run.name, "dim"))
                continue
            now = time.monotonic()
            speed = run.speed(max(run.began, now - 2), now) if not run.ended else run.step / run.seconds
            bar = ProgressBar(run.total, run.step, width=24, complete_style="cyan", finished_style="green")
            table.add_row(
                Text(run.name, "bold"), bar, f"{run.step:>{len(str(run.total))}}/{run.total}",
                f"{speed:3.0f} steps/s", Text(duration(run.seconds), "dim"),
            )  # fmt: skip
        return table

    def _lanes(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        run, columns = self.show.storm, max(20, min(self.console.width - 30, 100))
        spans = list(pairwise(run.began + run.seconds * edge / columns for edge in range(columns + 1)))
        table = Table.grid(padding=(0, 2))
        for lane, history in list(self.show.lanes.items()):
            hits = [run.began + each.at for each in self.show.strikes if lane in each.victims]
            looks = [HIT if any(a <= hit < b for hit in hits) else LOOKS[worst(history, a, b)] for a, b in spans]
            now = history[-1][1]
            runs = [("".join(sign for sign, _ in same), style) for style, same in groupby(looks, itemgetter(1))]
            table.add_row(lane, Text.assemble(*runs), Text(now, LOOKS[now][1]))
        speeds = [run.speed(*span) for span in spans]
        top = max([*speeds, 1e-9])
        line = "".join(BLOCKS[min(8, round(8 * speed / top))] for speed in speeds)
        table.add_row(Text("steps/s", "dim"), Text(line, "cyan"), Text(f"up to {top:.0f}", "dim"))
        return table

    def _strikes(self) -> Any:
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for title in ("", "attack", "at step", "next step", "lost", "back"):
            table.add_column(title, justify="left" if title in ("attack", "lost") else "right", no_wrap=True)
        for each in self.show.strikes[-max(4, self.console.height - 24) :]:
            times = [f"[green]{took:.2f} s" if took is not None else "…" for took in (each.next_step, each.back)]
            lost = "…" if each.next_step is None else f"[yellow]{each.lost}" if each.lost else "[green]nothing"
            table.add_row(f"[dim]{each.at:.1f} s", each.words, str(each.step), times[0], lost, times[1])
        return table

    def _verdict(self) -> Any:
        from rich import box
        from rich.panel import Panel
        from rich.text import Text

        show, colour = self.show, "green" if self.show.equal else "red"
        wide = max(len(run.name) for run in (show.calm, show.storm))
        text = Text()
        for run in (show.calm, show.storm):
            text.append(f"{run.name:{wide}}  ").append(f"{run.sha256}\n", f"bold {colour}")
        text.append(f"\n{summary(show)}\n\n").append(verdict(show), f"bold {colour}")
        return Panel(text, box=box.HORIZONTALS, border_style=colour, expand=False, padding=(1, 0))


def worst(history: list[tuple[float, str]], since: float, until: float) -> str:
    """The state of a process between two times; of several the one that a watcher must not miss."""
    first = [state for when, state in history if when <= since][-1:]
    seen = {"", *first, *(state for when, state in history if since < when < until)}
    return next(state for state in LOOKS if state in seen)


def summary(show: Show) -> str:
    """`9 attacks; the next step after 0.07 s (median), 2.90 s (longest); 0 steps lost`"""
    times, lost = show.recoveries, show.lost
    took = f"the next step after {median(times):.2f} s (median), {max(times):.2f} s (longest)" if times else ""
    parts = [f"{len(show.strikes)} attacks", took, f"{lost} step{'s' * (lost != 1)} lost"]
    return "; ".join(filter(None, parts))


def verdict(show: Show) -> str:
    return "EQUAL: the same weights, bit for bit" if show.equal else "DIFFERENT: these are not the same weights"
