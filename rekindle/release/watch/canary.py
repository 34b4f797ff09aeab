"""One step of a canary: compares the candidate with the champion until the time of the step is over
or the candidate is worse."""

import time

from rekindle import tracking
from rekindle.errors import TrackingError
from rekindle.release.serve_config import PORT, CanaryConfig
from rekindle.release.watch.judgement import compute_ks_distance, compute_quantile, find_breach
from rekindle.release.watch.scrape import ServerWatch, VersionStats

# number of checks in a step; one more is made if the step must wait for enough requests
CHECKS = 10
MAX_PAUSE_S = 5.0  # longest pause between two scrapes


class Canary:
    """Compares the servers of the candidate with the servers of the champion. Servers are
    identified by their Deployment and version."""

    def __init__(
        self,
        name: str,
        champion_deployment: str,
        deployment: str,
        version: str,
        champion: str,
        config: CanaryConfig,
    ) -> None:
        self.name = name
        self.watch = ServerWatch(
            f"http://{champion_deployment}:{PORT}", f"http://{deployment}:{PORT}"
        )
        self.candidate_key = (deployment, version)
        self.champion_key = (champion_deployment, champion)
        self.champion = champion
        self.config = config
        self.alpha = config.false_alarms / (len(config.shares) * (CHECKS + 1))
        self.start = time.monotonic()
        self.champion_changed = False

    @property
    def stats(self) -> tuple[VersionStats, VersionStats]:
        """Statistics of the candidate and the champion."""
        # servers that an earlier version of Rekindle has deployed do not report their Deployment
        stats = self.watch.stats
        earlier_server = ("", self.champion)
        champion = stats.get(self.champion_key) or stats.get(earlier_server, VersionStats())
        return stats.get(self.candidate_key, VersionStats()), champion

    def observe(self) -> str:
        """Compare both versions until the end of the step. Return the reason for a rollback of the
        candidate, or ""."""
        seconds = 60 * self.config.minutes
        for number in range(1, CHECKS + 1):
            self._watch_until(self.start + seconds * number / CHECKS)
            reason = self._describe_champion_change() or find_breach(
                *self.stats, self.config, self.alpha
            )
            if reason:
                return reason

        if self._has_enough_requests():
            return ""

        deadline = self.start + seconds + 60 * self.config.wait_minutes
        while not self._has_enough_requests():
            reason = self._describe_champion_change()
            if reason:
                return reason

            if time.monotonic() > deadline:
                candidate, champion = self.stats
                return (
                    f"after {(time.monotonic() - self.start) / 60:.3g} minutes the candidate had"
                    f" answered {candidate.requests:g} requests, the champion"
                    f" {champion.requests:g}: too few for a comparison (serve.canary.requests is"
                    f" {self.config.requests})"
                )

            self._watch_until(time.monotonic() + min(MAX_PAUSE_S, seconds / CHECKS))

        return self._describe_champion_change() or find_breach(*self.stats, self.config, self.alpha)

    def figures(self) -> dict[str, float]:
        """Return metrics of the candidate and the champion for MLflow."""
        figures: dict[str, float] = {}

        candidate, champion = self.stats
        for name, stats in (("candidate", candidate), ("champion", champion)):
            figures[f"{name}.requests"] = stats.requests
            figures[f"{name}.errors"] = stats.errors
            figures[f"{name}.median_ms"] = 1000 * compute_quantile(stats.seconds, 0.5)

        shared_outputs = candidate.scores.keys() & champion.scores.keys()
        distance = max(
            (
                compute_ks_distance(candidate.scores[name], champion.scores[name])
                for name in shared_outputs
            ),
            default=0.0,
        )
        return figures | {"score_shift": distance}

    def _describe_champion_change(self) -> str:
        """Return a reason to stop if another version has become the champion, else ""."""
        try:
            champion = tracking.champion(self.name)
        except TrackingError:
            return ""  # ignore it: the promotion checks the champion again
        if not champion or champion.version == self.champion:
            return ""
        self.champion_changed = True
        return f"by now the champion is version {champion.version}"

    def _watch_until(self, end_time: float) -> None:
        """Scrape the servers periodically until `end_time` (monotonic)."""
        while (remaining_seconds := end_time - time.monotonic()) > 0:
            time.sleep(min(MAX_PAUSE_S, remaining_seconds))
            self.watch.scrape()

    def _has_enough_requests(self) -> bool:
        return all(stats.requests >= self.config.requests for stats in self.stats)
