"""Runs one step of a canary: compares the candidate with the champion until the time of the step is
over, or until the candidate is found to be worse."""

import time

from rekindle import tracking
from rekindle.errors import TrackingError
from rekindle.release.serve_config import DEFAULT_PORT, CanaryConfig
from rekindle.release.watch.judgement import compute_ks_distance, compute_quantile, find_breach
from rekindle.release.watch.scrape import ServerWatch, VersionStats

# number of checks in a step of a canary; another check follows if the step must wait for enough
# requests
CHECK_COUNT = 10
# longest pause in seconds between two scrapes of the servers
MAX_PAUSE_S = 5.0


class Canary:
    """Compares the servers of the candidate with the servers of the champion. Servers are
    identified by their Deployment and version."""

    def __init__(
        self,
        model_name: str,
        champion_deployment: str,
        candidate_deployment: str,
        candidate_version: str,
        champion_version: str,
        canary_config: CanaryConfig,
    ) -> None:
        self.name = model_name
        self.watch = ServerWatch(
            f"http://{champion_deployment}:{DEFAULT_PORT}",
            f"http://{candidate_deployment}:{DEFAULT_PORT}",
        )
        self.candidate_key = (candidate_deployment, candidate_version)
        self.champion_key = (champion_deployment, champion_version)
        self.champion = champion_version
        self.config = canary_config
        self.alpha = canary_config.false_alarms / (len(canary_config.shares) * (CHECK_COUNT + 1))
        self.start = time.monotonic()
        self.champion_changed = False

    @property
    def stats(self) -> tuple[VersionStats, VersionStats]:
        """Statistics of the candidate and the champion."""
        # servers that an earlier version of Rekindle has deployed do not report their Deployment
        stats_by_server = self.watch.stats
        earlier_server = ("", self.champion)
        champion_stats = stats_by_server.get(self.champion_key) or stats_by_server.get(
            earlier_server, VersionStats()
        )
        return stats_by_server.get(self.candidate_key, VersionStats()), champion_stats

    def observe(self) -> str:
        """Compare both versions until the end of the step. Return the reason for a rollback of the
        candidate, or ""."""
        step_seconds = 60 * self.config.minutes
        for check_number in range(1, CHECK_COUNT + 1):
            self._watch_until(self.start + step_seconds * check_number / CHECK_COUNT)
            breach_reason = self._describe_champion_change() or find_breach(
                *self.stats, self.config, self.alpha
            )
            if breach_reason:
                return breach_reason

        if self._has_enough_requests():
            return ""

        deadline_seconds = self.start + step_seconds + 60 * self.config.wait_minutes
        while not self._has_enough_requests():
            breach_reason = self._describe_champion_change()
            if breach_reason:
                return breach_reason

            if time.monotonic() > deadline_seconds:
                candidate_stats, champion_stats = self.stats
                return (
                    f"after {(time.monotonic() - self.start) / 60:.3g} minutes the candidate had"
                    f" answered {candidate_stats.requests:g} requests, the champion"
                    f" {champion_stats.requests:g}: too few for a comparison"
                    f" (serve.canary.requests is {self.config.requests})"
                )

            self._watch_until(time.monotonic() + min(MAX_PAUSE_S, step_seconds / CHECK_COUNT))

        return self._describe_champion_change() or find_breach(*self.stats, self.config, self.alpha)

    def figures(self) -> dict[str, float]:
        """Return metrics of the candidate and the champion for MLflow."""
        metric_values: dict[str, float] = {}

        candidate_stats, champion_stats = self.stats
        for version_role, version_stats in (
            ("candidate", candidate_stats),
            ("champion", champion_stats),
        ):
            metric_values[f"{version_role}.requests"] = version_stats.requests
            metric_values[f"{version_role}.errors"] = version_stats.errors
            metric_values[f"{version_role}.median_ms"] = 1000 * compute_quantile(
                version_stats.seconds, 0.5
            )

        shared_outputs = candidate_stats.scores.keys() & champion_stats.scores.keys()
        ks_distance = max(
            (
                compute_ks_distance(
                    candidate_stats.scores[output_name], champion_stats.scores[output_name]
                )
                for output_name in shared_outputs
            ),
            default=0.0,
        )
        return metric_values | {"score_shift": ks_distance}

    def _describe_champion_change(self) -> str:
        """Return a reason to stop the canary if another version has become the champion, else
        ""."""
        try:
            champion = tracking.champion(self.name)
        except TrackingError:
            # ignore a missing or equal champion, because the promotion checks the champion again
            return ""
        if not champion or champion.version == self.champion:
            return ""
        self.champion_changed = True
        return f"by now the champion is version {champion.version}"

    def _watch_until(self, end_seconds: float) -> None:
        """Scrape the servers periodically until `end_seconds`, a time of the monotonic clock."""
        while time.monotonic() < end_seconds:
            time.sleep(max(0.0, min(MAX_PAUSE_S, end_seconds - time.monotonic())))
            self.watch.scrape()

    def _has_enough_requests(self) -> bool:
        return all(version_stats.requests >= self.config.requests for version_stats in self.stats)
