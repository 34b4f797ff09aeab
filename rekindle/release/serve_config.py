"""The sections `serve:`, `drift:` and `retention:` of a config, and the settings of a server."""

from pydantic import Field, model_validator

from rekindle.sections import Section
from rekindle.step import StepInputs

# port of a model server in its pod
DEFAULT_PORT = 8080
# default of serve.max_batch
DEFAULT_MAX_BATCH = 16
DNS_NAME_PATTERN = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
# results of a canary; a third result, after a rollback, starts with `taken back` and contains the
# reason
PASSED_RESULT = "passed"
CHAMPION_CHANGED_RESULT = "champion changed"
# annotation of a Deployment with the model version that it serves
VERSION_ANNOTATION = "rekindle.dev/version"


class Limits(Section):
    """Capacity and limits of a model server."""

    processes: int = Field(
        default=1, ge=1, le=64, description="number of processes of one server; each has the model"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of one process")
    max_instances: int = Field(
        default=1000, ge=1, description="maximum number of instances per request (else 413)"
    )
    max_batch: int = Field(
        default=DEFAULT_MAX_BATCH,
        ge=1,
        description=(
            "maximum number of requests predicted together, and of instances that `predict` gets; "
            "1: one at a time, with the same bits as in the evaluation"
        ),
    )
    batch_delay_ms: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="time that a request waits for other requests in its batch",
    )
    max_bytes: int = Field(
        default=16_000_000, ge=1000, description="maximum size of a request's body"
    )
    max_waiting: int = Field(
        default=128, ge=1, description="maximum number of requests queued or in progress (else 503)"
    )
    body_seconds: float = Field(
        default=10.0,
        gt=0,
        description="time limit for a request to arrive, head and body together (else 408)",
    )
    drain_seconds: float = Field(
        default=2.0,
        ge=0,
        description="time after SIGTERM until the cluster no longer routes to this server",
    )
    grace_seconds: float = Field(
        default=20.0,
        gt=0,
        description="time after `drain_seconds` for requests in flight and open connections",
    )


class CanaryConfig(Section):
    """Progressive rollout of a new release, which gets a growing share of the traffic, and is
    rolled back if it is worse than the champion."""

    steps: list[int] = Field(
        default=[5, 25, 100],
        description="percent of the traffic in each step; the last step, 100, is the promotion",
    )
    minutes: float = Field(default=5.0, gt=0, description="minimum duration of each step")
    requests: int = Field(
        default=2500,
        ge=1,
        description="minimum number of requests per step, of the candidate and of the champion",
    )
    wait_minutes: float = Field(
        default=60.0,
        gt=0,
        description=(
            "time after `minutes` to wait for `requests`; then the candidate is rolled back"
        ),
    )
    slower: float = Field(
        default=1.5, ge=1, description="largest response time, relative to the champion's time"
    )
    score_shift: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description=(
            "largest Kolmogorov-Smirnov distance between the predictions of candidate and champion"
        ),
    )
    false_alarms: float = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="largest probability that a good candidate is rolled back",
    )
    shadow: bool = Field(
        default=False,
        description=(
            "send the candidate a copy of every request, and discard its answers (needs `gateway`)"
        ),
    )
    gateway: str = Field(
        default="",
        description=(
            "Gateway whose HTTPRoute splits the traffic exactly (empty: split by number of pods)"
        ),
    )

    @model_validator(mode="after")
    def _validate_steps(self) -> "CanaryConfig":
        if (
            len(self.steps) < 2
            or self.steps[0] < 1
            or self.steps[-1] != 100
            or sorted({*self.steps}) != self.steps
        ):
            raise ValueError(
                f"steps is {self.steps}: it must be percentages that rise to 100, such as [5, 25,"
                " 100]"
            )

        if self.shadow and not self.gateway:
            raise ValueError(
                "shadow needs a Gateway, which copies the requests: set serve.canary.gateway"
            )

        return self

    @property
    def shares(self) -> list[int]:
        """The candidate's share of the traffic in each watched step, in percent; 100 for a shadow,
        which gets copies of all requests."""
        if self.shadow:
            return [100]
        return self.steps[:-1]

    def next_share(self, share_percent: int) -> int:
        """Return the next share of the traffic after `share_percent`, or 0 if `share_percent` is
        the last share."""
        return next(
            (traffic_share for traffic_share in self.shares if traffic_share > share_percent), 0
        )


class ServeConfig(Limits):
    """The `serve:` section of a config."""

    port: int = Field(default=8080, ge=1, le=65535, description="port of the service")
    min_replicas: int = Field(
        default=2,
        ge=1,
        description=(
            "minimum number of servers; with 1, the service is down while its node is drained"
        ),
    )
    max_replicas: int = Field(default=4, ge=1, description="maximum number of servers")
    host: str = Field(
        default="",
        pattern=rf"^({DNS_NAME_PATTERN})?$",
        max_length=253,
        description=(
            "DNS name of the model outside of the cluster, such as models.example.com (in lower"
            " case, without scheme, port, path and wildcard)"
        ),
    )
    gateway: str = Field(
        default="",
        pattern=rf"^(({DNS_NAME_PATTERN}/)?{DNS_NAME_PATTERN})?$",
        description="Gateway of the HTTPRoute for `host`: NAME or NAMESPACE/NAME (empty: Ingress)",
    )
    ingress_class: str = Field(
        default="",
        pattern=rf"^({DNS_NAME_PATTERN})?$",
        description="name of the IngressClass (empty: the cluster's default)",
    )
    tls_secret: str = Field(
        default="",
        pattern=rf"^({DNS_NAME_PATTERN})?$",
        description="name of the Secret with the certificate of the Ingress (empty: no TLS)",
    )
    annotations: dict[str, str] = Field(
        default_factory=dict,
        description="annotations of the HTTPRoute or Ingress, such as of an authentication proxy",
    )
    token: bool = Field(
        default=False,
        description=(
            "clients must send `Authorization: Bearer` with a token of the Secret rekindle-token"
        ),
    )
    keep_releases: int = Field(
        default=3,
        ge=1,
        description="number of earlier releases whose Deployments are kept for `rekindle rollback`",
    )
    canary: CanaryConfig | None = Field(
        default=None,
        description="progressive rollout (default: all traffic at once, after verification)",
    )
    cpu_percent: int = Field(
        default=70,
        ge=1,
        le=100,
        description="usage of the requested CPU above which servers are added",
    )
    memory_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="usage of the requested memory above which servers are added (0: ignored)",
    )
    metrics: dict[str, str] = Field(
        default_factory=dict,
        description="pod metric → average above which servers are added (needs a metrics adapter)",
    )
    scale_down_seconds: int = Field(
        default=300,
        ge=0,
        le=3600,
        description="time of low load before servers are removed, one a minute",
    )

    @model_validator(mode="after")
    def _validate_replicas(self) -> "ServeConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}: it must be at most max_replicas"
                f" ({self.max_replicas}). Lower it, or raise serve.max_replicas"
            )
        return self

    @model_validator(mode="after")
    def _validate_host(self) -> "ServeConfig":
        if self.host.rpartition(".")[2].isdigit():
            raise ValueError(
                f'host is "{self.host}": Kubernetes accepts a DNS name, but no IP address'
            )

        for field_name in ("gateway", "ingress_class", "tls_secret", "annotations"):
            if getattr(self, field_name) and not self.host:
                raise ValueError(
                    f"{field_name} has no effect without host: set serve.host to the DNS name of"
                    " the model"
                )

        for field_name in ("ingress_class", "tls_secret"):
            if self.gateway and getattr(self, field_name):
                raise ValueError(
                    f"{field_name} belongs to an Ingress, but gateway is set: remove one. The"
                    " listener of a Gateway has the certificate"
                )

        if self.host and self.canary and self.canary.gateway not in ("", self.gateway):
            raise ValueError(
                f'gateway is "{self.gateway}": it must be "{self.canary.gateway}" like'
                " canary.gateway, because one HTTPRoute has the host and splits the traffic. Set"
                " serve.gateway"
            )

        return self


class ServerSettings(StepInputs, Limits):
    """Settings of a model server."""

    model: str = Field(description="key prefix of a release in the object store")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=8080, ge=0, le=65535, description="port to listen on (0: a free port)"
    )
    deployment: str = Field(
        default="", description="name of the Deployment, by which a canary recognizes its servers"
    )


class DriftConfig(Section):
    """The `drift:` section of a config: comparison of requests with test rows."""

    model: str = Field(
        default="demo", description="name of the registered model, and of its pipeline"
    )
    threshold: float = Field(
        default=0.25,
        gt=0,
        description=(
            "PSI above this counts as drift, if chance does not explain it (0.1: a small change)"
        ),
    )
    minimum: int = Field(
        default=500,
        ge=50,
        description="minimum number of instances; fewer instances are counted in the next check",
    )
    ignore: list[str] = Field(
        default_factory=list, description="features and outputs that do not count, such as ids"
    )
    retrain: bool = Field(
        default=False,
        description="on a cluster: start the scheduled pipeline of the model if it drifted",
    )
    min_days_between: float = Field(
        default=7.0, ge=0, description="minimum days between the starts of two trainings"
    )


class RetentionConfig(Section):
    """Limits on the runs and releases of a pipeline, applied at the end of each run; without a
    limit, all runs and releases are kept."""

    keep_runs: int | None = Field(
        default=None, ge=1, description="number of ended runs to keep (empty: all)"
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="number of days to keep a run after its end (empty: without limit)",
    )
    keep_releases: int | None = Field(
        default=None,
        ge=1,
        description=(
            "number of the newest releases to keep of each model (empty: all); the champion and the"
            " releases that `rekindle rollback` can go back to are kept in any case"
        ),
    )
