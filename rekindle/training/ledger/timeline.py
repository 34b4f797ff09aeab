"""The intervals of one worker process, and the pause between two groups."""

from dataclasses import dataclass, field

from rekindle.training.ledger.ledger_summary import TRAINED_KIND, Incident, TimeInterval


@dataclass
class ProcessTimeline:
    """The intervals of one worker process. While the worker process is alive, its last interval has
    no final end."""

    name: str
    intervals: list[TimeInterval] = field(default_factory=list)
    alive: bool = False

    def switch(self, time_s: float, interval_kind: str | None) -> None:
        """Start an interval of the given kind at time `time_s`; None means that the process is dead
        from `time_s` on."""
        if self.alive:
            self.intervals[-1].end = time_s
            if self.intervals[-1].kind == interval_kind:
                return
        self.alive = interval_kind is not None
        if interval_kind:
            self.intervals.append(TimeInterval(time_s, time_s, interval_kind))

    def truncate(self, time_s: float) -> None:
        """Remove all time after `time_s` from the intervals, because the process was dead by
        then."""
        self.alive = False
        self.intervals = [
            TimeInterval(time_interval.start, min(time_interval.end, time_s), time_interval.kind)
            for time_interval in self.intervals
            if time_interval.start < time_s
        ]

    def relabel_trained_time(self, start_s: float, end_s: float, new_kind: str) -> float:
        """Change the intervals of kind `trained` between `start_s` and `end_s` to `new_kind`;
        return their total length in seconds."""
        if self.alive:
            self.intervals[-1].end = max(self.intervals[-1].start, end_s)

        interval_index = len(self.intervals)
        changed_seconds = 0.0

        while interval_index and self.intervals[interval_index - 1].end > start_s:
            interval_index -= 1
            last_interval = self.intervals[interval_index]
            if last_interval.kind == TRAINED_KIND and last_interval.start < end_s:
                cut_times_s = [
                    last_interval.start,
                    max(last_interval.start, start_s),
                    min(last_interval.end, end_s),
                    last_interval.end,
                ]

                cut_intervals = [
                    TimeInterval(piece_start_s, piece_end_s, piece_kind)
                    for piece_start_s, piece_end_s, piece_kind in zip(
                        cut_times_s,
                        cut_times_s[1:],
                        (TRAINED_KIND, new_kind, TRAINED_KIND),
                        strict=False,
                    )
                ]
                self.intervals[interval_index : interval_index + 1] = [
                    cut_interval
                    for cut_interval in cut_intervals
                    if cut_interval.start < cut_interval.end
                ]
                changed_seconds += cut_times_s[2] - cut_times_s[1]

        return changed_seconds


@dataclass
class GroupPause:
    """The pause between the end of one group and the start of the next."""

    # time when the coordinator told the previous group to stop after its current step
    opened: float | None = None
    # time when the previous group broke
    broken: float | None = None
    # True if a member died at a time that is unknown
    unseen: bool = False
    # time when the next group started
    until: float = 0.0
    # newest step that a member of the next group has restored from a snapshot or a checkpoint
    restored: int | None = None
    incidents: list[Incident] = field(default_factory=list)

    @property
    def is_after_failure(self) -> bool:
        return self.unseen or self.broken is not None
