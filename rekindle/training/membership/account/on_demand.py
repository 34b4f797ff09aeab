"""Replaces missing workers on spot nodes by workers on on-demand nodes
(`cluster.pods.train.on_demand_after_minutes`).

The coordinator changes the number of pods of a Deployment whose pods run only on on-demand nodes:
if fewer than `train.min_workers` workers were on spot nodes for some minutes, the Deployment gets
the missing ones; if workers on spot nodes have been back for as long, it gives its pods back.
"""

import os
from dataclasses import dataclass
from math import ceil
from urllib.parse import quote

from argolocal.common.environment import read_integer, read_seconds
from rekindle.kubernetes_names import (
    REKINDLE_ON_DEMAND,
    REKINDLE_ON_DEMAND_AFTER,
    REKINDLE_POD_WORKERS,
)
from rekindle.training.membership.account.account_api import API_ERRORS, AccountApi, ApiRefusal

# name of the ledger's event
ON_DEMAND_EVENT = "on_demand"
# minimum time between two requests after a failed request
RETRY_INTERVAL_S = 10.0
DEFAULT_DELAY_S = 600.0
MAX_POD_WORKERS = 1024


@dataclass
class OnDemandPlan:
    """Decides how many on-demand pods a training needs. A decision is made only if the current
    number was too low, or too high, for `delay_s` without interruption."""

    min_workers: int
    workers_per_pod: int
    delay_s: float
    # current number of pods; None until the Deployment was read
    pods: int | None = None
    # 1 if pods are missing, -1 if there are too many, 0 if their number is right
    direction: int = 0
    since_s: float = 0.0

    def decide(self, now_s: float, spot_workers: int) -> int | None:
        """Return the new number of pods, or None if the number of pods stays. `spot_workers`:
        number of live workers that are not on on-demand nodes."""
        if self.pods is None:
            return None

        missing_workers = max(0, self.min_workers - spot_workers)
        needed_pods = ceil(missing_workers / self.workers_per_pod)
        direction = (needed_pods > self.pods) - (needed_pods < self.pods)
        if direction != self.direction:
            self.direction = direction
            self.since_s = now_s

        if direction and now_s - self.since_s >= self.delay_s:
            return needed_pods
        return None

    def shift_times(self, pause_seconds: float) -> None:
        """Shift the stored time by the length of a pause of the coordinator process."""
        self.since_s += pause_seconds


class OnDemandWorkers:
    """The Deployment of on-demand workers of one training. A problem with the API is printed once,
    and never disturbs the training."""

    def __init__(self, api: AccountApi, deployment_name: str, plan: OnDemandPlan) -> None:
        self.api = api
        self.deployment_name = deployment_name
        self.plan = plan

    @classmethod
    def from_environment(cls, min_workers: int) -> "OnDemandWorkers | None":
        """Return the on-demand workers of this coordinator's training; None if it has none, or may
        not use the Kubernetes API. Raises ConfigError."""
        deployment_name = os.environ.get(REKINDLE_ON_DEMAND, "")
        api = AccountApi.from_environment()
        if not (deployment_name and api):
            return None

        remedy = "Correct cluster.pods.train.on_demand_after_minutes."
        plan = OnDemandPlan(
            max(1, min_workers),
            read_integer(REKINDLE_POD_WORKERS, 1, 1, MAX_POD_WORKERS),
            read_seconds(REKINDLE_ON_DEMAND_AFTER, DEFAULT_DELAY_S, remedy),
        )
        return cls(api, deployment_name, plan)

    def read(self) -> None:
        """Read the current number of pods, which another coordinator may have changed. Never
        raises."""
        answer = self._request("GET", None)
        if answer is not None:
            self.plan.pods = answer

    def scale(self, pod_count: int) -> dict[str, float] | None:
        """Change the number of pods. Return the fields of the ledger's event, or None if the number
        could not be changed. Never raises."""
        previous_pods = self.plan.pods or 0
        if self._request("PATCH", pod_count) is None:
            return None

        self.plan.pods = pod_count
        return {
            "workers": pod_count * self.plan.workers_per_pod,
            "previous": previous_pods * self.plan.workers_per_pod,
            "seconds": self.plan.delay_s,
        }

    def _request(self, method: str, pod_count: int | None) -> int | None:
        """Read or change the scale of the Deployment. Return its number of pods; None after a
        problem, or if the Deployment does not exist yet."""
        try:
            path = (
                f"/apis/apps/v1/namespaces/{self.api.read_namespace()}/deployments"
                f"/{quote(self.deployment_name, safe='')}/scale"
            )
            patch = None if pod_count is None else {"spec": {"replicas": pod_count}}
            answer = self.api.call(method, path, patch)
            # the API leaves out the number 0
            return int(answer["spec"].get("replicas") or 0) if answer else None
        except ApiRefusal as refusal:
            self.api.report_first(
                f"{refusal} Missing workers on spot nodes will not be replaced by on-demand nodes:"
                " render the platform with `--with signals`."
            )
        except (*API_ERRORS, KeyError, TypeError, AttributeError) as error:
            self.api.report_first(
                f"the on-demand workers could not be scaled ({error!r}). Trying again."
            )
        return None
