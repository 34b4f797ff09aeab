"""The types of the records of a sweep in the object store."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, JsonValue, RootModel, StringConstraints, model_validator

from rekindle.documents import BestValidation, Document


class BudgetStop(Document):
    """The decision that the budget ends the sweep, with the allowed (`limit`), used (`hours`) and
    expected worker-hours."""

    limit: float = Field(ge=0)
    hours: float = Field(ge=0)
    expected: float = Field(ge=0)


class SweepDecision(Document):
    """The content of the file jobs/NUMBER.json, which is the next job of the sweep, with the
    settings if the job's trial is new, or the end of the sweep (`stop`)."""

    trial: int | None = Field(default=None, ge=0)
    rung: int | None = Field(default=None, ge=0)
    pod: int | None = None
    settings: dict[str, JsonValue] | None = None
    attrs: dict[str, JsonValue] | None = None
    stop: BudgetStop | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        job_fields = self.model_fields_set - {"stop"}
        if self.stop is not None and job_fields:
            raise ValueError("a decision with `stop` must not have other fields")
        if self.stop is None and (self.trial is None or self.rung is None):
            raise ValueError("a decision must have `trial` and `rung`, or `stop`")
        if self.rung == 0 and (self.settings is None or self.attrs is None):
            raise ValueError("the first job of a trial must have `settings` and `attrs`")
        if self.rung and job_fields & {"settings", "attrs"}:
            raise ValueError("only the first job of a trial has `settings` and `attrs`")
        return self


class TrialFailure(Document):
    """The file failed.json, which contains the reason why a trial has failed."""

    # reason for the failure; a failed trial has no metric
    value: None = None
    why: str


class TrialModel(Document):
    """The fields of a trial's model.json that the sweep reads."""

    sha256: str
    step: int = Field(ge=0, lt=2**53)
    best: BestValidation | None = None
    files: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def is_of_program(self) -> bool:
        """True if a training program wrote the result; the metric of the trial is then recorded
        later, in a separate file."""
        return bool(self.files)


class TrialValidation(RootModel[dict[str, float | None]]):
    """The file validation.json: the loss and the measures of a trial; None if they are not
    finite."""

    model_config = ConfigDict(strict=True)


JobName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}/[0-9]{1,9}$")]
UsedSeconds = Annotated[float, Field(ge=0, lt=2**41)]


class UsedSecondsRecord(RootModel[dict[JobName, UsedSeconds]]):
    """The file seconds/PROCESS.json: the seconds that a process has used for each job
    TRIAL/RUNG."""

    model_config = ConfigDict(strict=True)
