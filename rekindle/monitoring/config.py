"""The `notify:` section of a config."""

from typing import Literal, get_args

from pydantic import Field, field_validator

from rekindle.sections import Section

Event = Literal["failure", "refusal", "release", "rollback"]
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
