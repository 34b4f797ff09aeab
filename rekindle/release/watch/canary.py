"""One step of a canary: looks at both sides until it is over, or the candidate is found to be worse."""

import time

from rekindle import tracking
from rekindle.errors import TrackingError
from rekindle.release.config import PORT, CanaryConfig
from rekindle.release.watch.judgement import breach, ks_distance, quantile
from rekindle.release.watch.scrape import Side, Watch

LOOKS = 10  # judgements in a step; one more when its requests came late
PAUSE = 5.0  # seconds, at most, between two looks


class Canary:
    """The candidate beside the champion, each named by its Deployment and its version."""

    def __init__(self, name: str, former: str, server: str, version: str, champion: str, rule: CanaryConfig) -> None:
        self.name = name
        self.watch = Watch(f"http://{former}:{PORT}", f"http://{server}:{PORT}")
        self.version, self.champion, self.rule = version, champion, rule
        self.alpha = rule.false_alarms / (len(rule.shares) * (LOOKS + 1))
        self.start = time.monotonic()

    @property
    def sides(self) -> tuple[Side, Side]:
        """The candidate and the champion."""
        return self.watch.sides.get(self.version, Side()), self.watch.sides.get(self.champion, Side())

    def observe(self) -> str:
        """Blocks until the step is over; why the candidate is to be taken back, empty if it is not."""
        seconds = 60 * self.rule.minutes
        for look in range(1, LOOKS + 1):
            self._until(self.start + seconds * look / LOOKS)
            if reason := self._replaced() or breach(*self.sides, self.rule, self.alpha):
                return reason
        if self._enough():
            return ""
        deadline = self.start + seconds + 60 * self.rule.wait_minutes
        while not self._enough():
            if reason := self._replaced():
                return reason
            if time.monotonic() > deadline:
                ours, theirs = self.sides
                return (
                    f"after {(time.monotonic() - self.start) / 60:.3g} minutes it had answered {ours.requests:g} "
                    f"requests, the champion {theirs.requests:g}: too few to judge it by (serve.canary.requests is "
                    f"{self.rule.requests})"
                )
            self._until(time.monotonic() + min(PAUSE, seconds / LOOKS))
        return breach(*self.sides, self.rule, self.alpha)

    def figures(self) -> dict[str, float]:
        """What both sides came to, for the record."""
        figures: dict[str, float] = {}
        ours, theirs = self.sides
        for who, side in (("candidate", ours), ("champion", theirs)):
            figures |= {f"{who}.requests": side.requests, f"{who}.errors": side.errors}
            figures |= {f"{who}.median_ms": 1000 * quantile(side.seconds, 0.5)}
        shared = ours.scores.keys() & theirs.scores.keys()
        distance = max((ks_distance(ours.scores[name], theirs.scores[name]) for name in shared), default=0.0)
        return figures | {"score_shift": distance}

    def _replaced(self) -> str:
        """Why the comparison is void: a rollback, or another release, has replaced the champion; else empty."""
        try:
            champion = tracking.champion(self.name)
        except TrackingError:
            return ""  # the promotion looks again
        if not champion or champion.version == self.champion:
            return ""
        return f"by now the champion is version {champion.version}"

    def _until(self, moment: float) -> None:
        """Look now and then until `moment`."""
        while (left := moment - time.monotonic()) > 0:
            time.sleep(min(PAUSE, left))
            self.watch.look()

    def _enough(self) -> bool:
        return all(side.requests >= self.rule.requests for side in self.sides)
