"""The input of the processes that run a training program: the agents of its pods and its
coordinator."""

import hashlib
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle.kubernetes_names import PROGRAM_MODULES
from rekindle.program.config import ProgramConfig
from rekindle.step import SHA256_OR_EMPTY, StepInputs, create_parser, parse_inputs
from rekindle.training.spec import Fingerprint

# maximum time to wait for all pods before the first start, because a pod that joins later restarts
# the program
JOIN_TIMEOUT_S = 10.0


class ProgramSpec(StepInputs):
    """The inputs of one run of a training program, which are the same for all its pods and the
    coordinator."""

    # inputs that should not change the result of the program
    NOT_IN_RESULT: ClassVar[frozenset[str]] = frozenset(
        {"dataset", "out", "checkpoints", "run_id", "part", "hung_seconds"}
        | {"silence_seconds", "workers", "min_workers", "max_workers"}
    )

    program: ProgramConfig = Field(description="how the program is started")
    workload: str = Field(description="module that loads and evaluates the result")
    model: dict[str, Any] = Field(
        default_factory=dict, description="the workload's `model` section"
    )
    workers: int = Field(1, ge=1, description="number of pods")
    min_workers: int = Field(1, ge=1, description="minimum number of live pods")
    max_workers: int = Field(1, ge=1, description="maximum number of pods in the group")
    silence_seconds: float = Field(
        1.0, ge=0.5, description="seconds without a message until a pod is dropped"
    )
    hung_seconds: float = Field(
        600.0,
        gt=0,
        description=(
            "seconds without output, progress or a checkpoint until the program is restarted"
        ),
    )
    dataset: str = Field(description="key prefix of the dataset directory in the object store")
    digest: str = Field(
        pattern=SHA256_OR_EMPTY, description="sha256 of the dataset, as returned by `prepare`"
    )
    out: str = Field(description="key prefix for the trained model")
    checkpoints: str = Field(description="key prefix for this run's checkpoints")
    run_id: str = Field("", description="MLflow run for the metrics (empty: none)")
    part: str = Field(
        "", description="prefix of the training's metrics, if the run has several trainings"
    )

    @property
    def join_timeout_s(self) -> float:
        return JOIN_TIMEOUT_S

    @property
    def reuse(self) -> Literal["", "yes", "no"]:
        """The field is always "", because the result of a program is never reused."""
        return ""

    @classmethod
    def from_flags(cls, argv: list[str]) -> Self:
        """Parse the command line of an agent or the coordinator. Raises ConfigError."""
        flag_values = vars(create_parser(PROGRAM_MODULES.step, cls).parse_args(argv))
        return cast(
            Self,
            parse_inputs(
                cls,
                {
                    flag_name: flag_values[flag_name]
                    for flag_name in flag_values
                    if flag_name in cls.model_fields
                },
            ),
        )

    def identity(self) -> dict[str, Any]:
        """Return the inputs that the result depends on."""
        program_fields = self.program.model_dump(
            mode="json", exclude=set(ProgramConfig.NOT_IN_RESULT)
        )
        return {
            "workload": self.workload,
            "model": self.model,
            "program": program_fields,
            "digest": self.digest,
        }

    def identity_hash(self) -> str:
        """Return the sha256 of `identity()`, which the model of a run records."""
        return hashlib.sha256(to_json(self.identity(), sort_keys=True).encode()).hexdigest()

    @property
    def ledger(self) -> str:
        """The key prefix of the run's ledger in the object store."""
        return f"{self.checkpoints}/ledger"

    def find_fingerprint_mismatches(self, fingerprint: Fingerprint) -> list[str]:
        """Return [], because a program may run on any kind of node."""
        return []
