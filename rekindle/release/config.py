"""The sections `serve:` and `drift:` of a config, and what one server is started with."""

from pydantic import Field, model_validator

from rekindle.sections import Section
from rekindle.step import StepInputs

PORT = 8080  # of every model server in its pod
VERSION_ANNOTATION = "rekindle.dev/version"  # of a Deployment: the version of the registered model that it serves


class Limits(Section):
    """What one server takes on."""

    processes: int = Field(default=1, ge=1, le=64, description="processes of one server, each with the whole model")
    threads: int = Field(default=1, ge=1, description="CPU threads of one process")
    max_instances: int = Field(default=1000, ge=1, description="instances in one request; more are answered 413")
    max_batch: int = Field(
        default=16,
        ge=1,
        description="requests that wait and are predicted together, if the workload has a predictor of its own",
    )
    batch_delay_ms: float = Field(
        default=0.0, ge=0, le=1000, description="a request waits this long for others to be predicted with it"
    )
    max_bytes: int = Field(default=16_000_000, ge=1000, description="size of a request's body")
    max_waiting: int = Field(
        default=128, ge=1, description="requests that wait or are predicted; more are answered 503 with Retry-After"
    )
    body_seconds: float = Field(
        default=10.0, gt=0, description="a client that takes longer to send its request gets 408"
    )
    drain_seconds: float = Field(
        default=2.0, ge=0, description="after SIGTERM, until the routes to this server are gone"
    )
    grace_seconds: float = Field(
        default=20.0, gt=0, description="after that, for the requests in flight and for clients that keep a connection"
    )


class CanaryConfig(Section):
    """A new release gets a growing part of the traffic, and is taken back if it does worse than what serves."""

    steps: list[int] = Field(default=[5, 25, 100], description="percent of the traffic; the last, 100, is the release")
    minutes: float = Field(default=5.0, gt=0, description="of each step")
    requests: int = Field(
        default=2500, ge=1, description="the candidate must have answered so many in a step, and the champion too"
    )
    wait_minutes: float = Field(
        default=60.0, gt=0, description="a step waits so long for these requests; then the candidate is taken back"
    )
    slower: float = Field(default=1.5, ge=1, description="times as long as the champion's answers may take")
    score_shift: float = Field(
        default=0.25, ge=0, lt=1, description="largest Kolmogorov-Smirnov distance of what both predict"
    )
    false_alarms: float = Field(
        default=0.01, gt=0, lt=1, description="a good candidate is taken back with at most this probability"
    )
    shadow: bool = Field(
        default=False, description="the candidate gets a copy of every request, and answers nobody (needs `gateway`)"
    )
    gateway: str = Field(
        default="", description="Gateway whose HTTPRoute splits the traffic exactly (empty: numbers of pods do)"
    )

    @model_validator(mode="after")
    def _sound(self) -> "CanaryConfig":
        if len(self.steps) < 2 or self.steps[0] < 1 or self.steps[-1] != 100 or sorted({*self.steps}) != self.steps:
            raise ValueError(f"steps is {self.steps}: percentages that rise to 100, such as [5, 25, 100]")
        if self.shadow and not self.gateway:
            raise ValueError("shadow needs a Gateway, which copies the requests: set serve.canary.gateway")
        return self

    @property
    def shares(self) -> list[int]:
        """Percent of the traffic in each step that is watched; a shadow gets a copy of all."""
        return [100] if self.shadow else self.steps[:-1]

    def after(self, percent: int) -> int:
        """The share that follows `percent`; 0 if it was the last."""
        return next((share for share in self.shares if share > percent), 0)


class ServeConfig(Limits):
    """The `serve:` section of a config: how the released model is offered."""

    port: int = Field(default=8080, ge=1, le=65535, description="of the service")
    min_replicas: int = Field(
        default=2, ge=1, description="servers that always run; with 1, nobody answers while its node is drained"
    )
    max_replicas: int = Field(default=4, ge=1, description="servers under load")
    keep_releases: int = Field(
        default=3, ge=1, description="earlier releases whose Deployments stay, without pods, for `rekindle rollback`"
    )
    canary: CanaryConfig | None = Field(
        default=None, description="how a release gets the traffic (default: all at once, when it is verified)"
    )
    cpu_percent: int = Field(
        default=70, ge=1, le=100, description="use of the requested CPU above which servers are added"
    )
    memory_percent: int = Field(
        default=0, ge=0, le=100, description="the same of the requested memory (0: memory does not count)"
    )
    metrics: dict[str, str] = Field(
        default_factory=dict,
        description="metrics of the pods, by name: above this average servers are added (needs a metrics adapter)",
    )
    scale_down_seconds: int = Field(
        default=300, ge=0, le=3600, description="servers are removed, one a minute, after so long without need of them"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "ServeConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}: it must be at most max_replicas ({self.max_replicas}). "
                "Lower it, or raise serve.max_replicas"
            )
        return self


class ServerSettings(StepInputs, Limits):
    """One server."""

    model: str = Field(description="key prefix of a release in the object store")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on (0: a free one)")


class DriftConfig(Section):
    """What a released model's servers see, compared with its test rows."""

    model: str = Field(
        default="demo", description="registered model whose servers are watched; its pipeline is called so, too"
    )
    threshold: float = Field(
        default=0.25,
        gt=0,
        description="a PSI above it is drift, unless chance explains it; .1 is taken for a small change",
    )
    minimum: int = Field(
        default=500, ge=50, description="instances to judge; with fewer, the next look counts them as well"
    )
    ignore: list[str] = Field(default_factory=list, description="features and outputs that may change, such as numbers")
    retrain: bool = Field(
        default=False, description="on a cluster: start the scheduled pipeline of the model if it drifted"
    )
    min_days_between: float = Field(
        default=7.0, ge=0, description="days from the begin of its last training to that of one more"
    )
