"""The `notify:` section of a config, and the `drift:` section of pipelines/drift.py."""

from typing import Literal, get_args

from pydantic import Field, field_validator

from rekindle.sections import Section

Event = Literal["failure", "refusal", "release", "rollback", "drift"]
SECRET = "rekindle-notify"  # on a cluster: the Secret with the address
URL = "NOTIFY_URL"  # its key, and the variable of the environment


class NotifyConfig(Section):
    """Who is told what happened. The address is no part of a config: it is a secret, the value of NOTIFY_URL."""

    format: Literal["off", "slack", "json"] = Field(
        default="off",
        description="of the message: slack (also Mattermost's), or json, whose fields docs/after-release.md lists",
    )
    events: list[Event] = Field(default=list(get_args(Event)), description="those of which people are told")
    mlflow_url: str = Field(
        default="",
        pattern=r"^(https?://[^@\s]+)?$",
        description="where people reach MLflow, for links (empty: where steps do)",
    )

    @field_validator("mlflow_url")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        return url.rstrip("/")


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
