"""A workload: the module that defines one model, its data, and how it is judged.

`steps/digits.py` is an example. Any importable module with these names is a workload. Importing it must be cheap (no
torch at its top), because every command reads its `Data` and `Model` sections to check a config.
"""

import hashlib
import inspect
import json
import shutil
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from pydantic import BaseModel, Field

from rekindle import project
from rekindle.errors import ConfigError, DataError, did_you_mean
from rekindle.gate import Metric
from rekindle.sections import Section

if TYPE_CHECKING:
    import torch

DATASET = "dataset.json"
POD_PRIVATE = Path("/tmp")


class DataConfig(Section):
    """What every workload's `data:` section has; a workload adds its own fields."""

    source: str = Field(description="where the raw data is: a file, a folder, an s3:// URI, or simulate://SEED")
    tolerated_rejects: float = Field(
        default=0.001, ge=0, le=1, description="share of bad rows above which the run stops"
    )

    def at(self, time: datetime) -> Self:
        """The section for a run that was scheduled for `time` (UTC): where a window moves, its ends are set here."""
        return self

    @property
    def moves(self) -> bool:
        """Whether `at` gives other data at another time (default: where a section has an `at` of its own)."""
        return type(self).at is not DataConfig.at

    def check_source(self) -> None:
        """Raises ConfigError if the source is a path that is not on this machine, or that its pods do not see."""
        path = Path(self.source)
        if "://" in self.source:
            return
        if path.exists():
            visible = map(Path, project.search_path())
            if path.is_relative_to(POD_PRIVATE) and not any(path.is_relative_to(folder) for folder in visible):
                raise ConfigError(
                    f"data.source is {self.source!r}: each pod has a /tmp of its own and does not see it. Move it "
                    f"below {Path.cwd()}, or make it an object: rekindle put {self.source}"
                )
            return
        near = {str(path.with_name(other.name)) for other in path.parent.glob("*")}
        raise ConfigError(
            f"data.source is {self.source!r}: there is no such file or folder.{did_you_mean(self.source, near)}"
        )


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`. The engine writes it to the dataset's `dataset.json`.

    `facts` (JSON) are handed to `model` and `predict`, here and where the model serves; `data_until` among them (ISO
    8601 text with a time zone) says where what the model knows ends: the release and the server show it. `tags` are
    shown on the MLflow run. `digest` identifies the dataset; if it is empty, the engine takes the sha256 over the
    files. `newest` is the time of the newest row (ISO 8601 with a time zone): where the data moves, a run whose
    source has no newer rows than the last run's is warned of.
    """

    rows: int
    rejected: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    warnings: list[str] = field(default_factory=list)  # what looks wrong in the data, a sentence each
    shares: dict[str, float] = field(default_factory=dict)  # such as of positives: the next run compares its own
    newest: str = ""


@dataclass(frozen=True)
class Refreshed:
    """The result of `refresh`: so many rows of newer data, the dataset's facts from now on (with a new `data_until`),
    and instances by which the servers are verified (none: the release's example)."""

    rows: int
    facts: dict[str, Any]
    instances: list[dict[str, Any]] = field(default_factory=list)


class Example(NamedTuple):
    """One test row. `examples` may also give plain tuples: (instance, truth) or (instance, truth, group)."""

    instance: dict[str, Any]  # as a client sends it
    truth: Any
    group: Any = None  # rows of one group depend on each other, such as those of one customer
    baseline: Any = None  # the prediction of a simple model, shown beside the candidate's
    part: str | None = None  # such as its week: a metric is the mean over the parts


class Dataset(Sized, Protocol):
    """Random access by sample index: `batch` is a pure function of its indices.

    A dataset with state of its own (a curriculum, the cursor of a stream) also defines
    `state_dict() -> dict` and `load_state_dict(dict)`: small, JSON, and
    equal in all workers between two steps, though each reads different batches. So it changes only in a third function,
    `advance(step)`, which every worker calls after update number `step` (from 1); any other change is lost when a step
    is repeated. The state is part of every snapshot and checkpoint, and is sent to joining workers.
    """

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """The samples at `indices` (int64 [B]), each tensor with leading dimension B."""
        ...


class Predictor(Protocol):
    """A released model that answers requests and keeps no state between them; see rekindle/release/predictor.py."""

    @property
    def Request(self) -> type[BaseModel]:
        """The pydantic model of a whole request: a list `instances`, and what else it may hold."""
        ...

    def example(self) -> dict[str, Any]:
        """A valid request, for the server's warm-up and as documentation."""
        ...

    def predict(self, requests: Sequence[Any]) -> list[list[Any]]:
        """For each Request a JSON value per instance, in order; one request must not influence the others.

        Raises DataError for an invalid request.
        """
        ...


class Workload(Protocol):
    """The names a workload module must define.

    `predictor(release) -> Predictor` takes the place of `Instance` and `predict`, where a request holds more than its
    instances.
    `refresh(release, data, out) -> Refreshed | None` brings what a released model knows of the world up to newer data:
    it writes `out/state/`, which replaces that of the release; None: there is no newer data.

    docs/training.md describes what it may define for its training: `optimizer(model, train) -> torch.optim.Optimizer`,
    `schedule(step, total) -> float`, `splits = ("train", "validation")`, `measures(model, batch) -> dict[str, float]`.
    """

    Data: type[DataConfig]
    Model: type[Section]
    metrics: Sequence[Metric]  # the first compares the candidate with the champion

    def prepare(self, data: Any, out: Path) -> Prepared:
        """Raw data → files in the empty directory `out`. Raises DataError."""
        ...

    def dataset(self, path: Path, split: str) -> Dataset:
        """The samples of `split` of a dataset directory: "train", or "validation" if train.validation is "workload"."""
        ...

    def model(self, section: Any, facts: dict[str, Any]) -> "torch.nn.Module":
        """A freshly initialised model (the caller has seeded torch)."""
        ...

    def loss(self, model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
        """Scalar mean loss of one micro-batch."""
        ...

    def examples(self, path: Path) -> Iterable[tuple[Any, ...]] | Sized:
        """The test rows of a dataset: (instance as a client sends it, truth), or an Example for more.

        `examples(path, champion)` gets the facts of the dataset that the champion was trained on, if that is another
        one, and leaves out the rows that the champion has seen: those do not judge the candidate beside it.
        A rekindle.Examples has all rows by column, and may score them in its own way and add to the report.
        """
        ...

    Instance: type[BaseModel]  # one instance of a request

    def predict(self, model: "torch.nn.Module", instances: list[Any], facts: dict[str, Any]) -> list[Any]:
        """A JSON value for each Instance, in order; the model is in eval mode."""
        ...


REQUIRED = ("Data", "Model", "metrics", "prepare", "dataset", "model", "loss", "examples")
SERVED = ("Instance", "predict")  # required as well, unless the workload has a predictor
GONE = {  # former hooks, and what does the same
    "evaluate": "give the metrics functions, and let `examples` return a rekindle.Examples with `score` and `report`",
    "replay": "let `examples` return a rekindle.Examples whose `report` writes the requests (record_predictions)",
    "baseline": "let `examples` yield rekindle.Example(instance, truth, baseline=...)",
    "seen": "define `examples(path, champion)`, and leave out the rows that a champion with these facts has seen",
}
ARGUMENTS = {  # of the functions, the optional ones included
    **{"prepare": ("data", "out"), "dataset": ("path", "split"), "model": ("section", "facts")},
    **{"loss": ("model", "batch"), "measures": ("model", "batch"), "examples": ("path",)},
    **{"predict": ("model", "instances", "facts"), "optimizer": ("model", "train"), "schedule": ("step", "total")},
    **{"predictor": ("release",), "refresh": ("release", "data", "out")},
}


def load(name: str) -> Workload:
    """The workload module called `name`. Raises ConfigError if it cannot be imported or lacks a name."""
    workload = project.load(name, "workload", REQUIRED)
    for attribute, instead in GONE.items():
        if hasattr(workload, attribute):
            raise ConfigError(
                f'workload "{name}" defines {attribute}, which the engine does not call any more: {instead} (see '
                "docs/your-own-model.md). If it is a function of your own, begin its name with an underscore."
            )
    missing = [attribute for attribute in SERVED if not hasattr(workload, attribute)]
    if missing and not hasattr(workload, "predictor"):
        raise ConfigError(
            f'workload "{name}" lacks {", ".join(missing)}: it must define {" and ".join(SERVED)}, by which it is '
            "judged and served, or a predictor of its own (see docs/your-own-model.md)."
        )
    metrics = workload.metrics
    if not isinstance(metrics, (tuple, list)) or not all(isinstance(metric, Metric) for metric in metrics):
        raise ConfigError(f'workload "{name}": metrics is {metrics!r}: it must be a tuple, such as (Metric(...),).')
    names = [metric.name for metric in metrics]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f'workload "{name}": metrics has the names {names}: give at least one, each its own name.')
    for attribute, base in (("Data", DataConfig), ("Model", Section), ("Instance", BaseModel)):
        value = getattr(workload, attribute, base)
        if not (isinstance(value, type) and issubclass(value, base)):
            raise ConfigError(f'workload "{name}": {attribute} is {value!r}: it must be a subclass of {base.__name__}.')
    functionless = [metric.name for metric in metrics if metric.function is None]
    if functionless:
        raise ConfigError(
            f'workload "{name}": the metric {functionless[0]} has no function: Metric({functionless[0]!r}, function).'
        )
    champion = ("champion",) if compares(workload) else ()
    for function, names in (ARGUMENTS | {"examples": (*ARGUMENTS["examples"], *champion)}).items():
        _check_arguments(name, function, getattr(workload, function, None), names)
    _check_spelling(name, workload)
    return cast(Workload, workload)


def compares(workload: Any) -> bool:
    """True if `examples` takes the facts of the dataset that the champion was trained on."""
    return callable(workload.examples) and len(inspect.signature(workload.examples).parameters) > 1


def _check_spelling(name: str, workload: Any) -> None:
    """Raise ConfigError if a function has nearly the name, and the arguments, of an optional one that is not there."""
    absent = {function for function in ARGUMENTS if not hasattr(workload, function)}
    for attribute, value in vars(workload).items():
        near = get_close_matches(attribute, absent, n=1, cutoff=0.6)
        if near and inspect.isfunction(value) and tuple(inspect.signature(value).parameters) == ARGUMENTS[near[0]]:
            raise ConfigError(
                f'workload "{name}" defines {attribute}({", ".join(ARGUMENTS[near[0]])}), which the engine does not '
                f'call. Did you mean "{near[0]}"? If not, begin its name with an underscore.'
            )


def _check_arguments(workload: str, name: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Raise ConfigError unless `function` can be called with these arguments in this order."""
    if callable(function):
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise ConfigError(
                f'workload "{workload}": {name}{inspect.signature(function)} cannot be called as '
                f"{name}({', '.join(arguments)}): {error}. Define it with these arguments."
            ) from error


def prepare(workload: Any, data: DataConfig, out: Path) -> tuple[Prepared, str]:
    """Makes the dataset directory `out`, whole or not at all; gives what was prepared and the dataset's digest.

    Raises DataError.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        prepared = workload.prepare(data, out)
        total = prepared.rows + prepared.rejected
        if prepared.rejected > data.tolerated_rejects * total:
            raise DataError(
                f"{prepared.rejected:,} of {total:,} rows were rejected: more than data.tolerated_rejects "
                f"({data.tolerated_rejects:g} of them). Correct the data, or raise it."
            )
        digest = record_dataset(out, prepared)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return prepared, digest


def record_dataset(out: Path, prepared: Prepared) -> str:
    """Write the dataset.json of a dataset whose other files are in `out`; gives its digest. Raises DataError.

    `prepare` needs none; a step that makes a dataset of another one ends with it.
    """
    if not isinstance(prepared, Prepared):
        raise DataError(f"`prepare` returned {type(prepared).__name__}: it must return rekindle.Prepared(rows=...).")
    if not any(out.iterdir()):
        raise DataError("`prepare` wrote no file into `out`: it must write there what `dataset` and `examples` read.")
    digest = prepared.digest or _digest(out)
    record = {"digest": digest, "rows": prepared.rows, "rejected": prepared.rejected, "facts": prepared.facts}
    try:
        text = json.dumps(record, indent=1, allow_nan=False)
        for name, time in (("data_until", prepared.facts.get("data_until")), ("newest", prepared.newest)):
            if time and not datetime.fromisoformat(time).tzinfo:
                raise ValueError(f"{name} is {time!r}, without a time zone")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the facts of `prepare` are not JSON ({error}): give numbers, texts, lists, and ISO 8601 times."
        ) from error
    (out / DATASET).write_text(text + "\n")
    return digest


def dataset_facts(path: Path) -> dict[str, Any]:
    """The facts of a dataset or release directory. Raises DataError."""
    return _recorded(path, "facts")


def digest_of(path: Path) -> str:
    """The digest of a dataset, or of that which a release was trained on. Raises DataError."""
    return _recorded(path, "digest")


def _recorded(path: Path, name: str) -> Any:
    try:
        return json.loads((path / DATASET).read_text())[name]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a whole dataset ({DATASET}: {error}): prepare it again.") from error


def data_until(path: Path) -> str:
    """The fact `data_until` of a dataset or release directory; empty if it has none."""
    return dataset_facts(path).get("data_until", "") if (path / DATASET).exists() else ""


def code_digest(workload: Any) -> str:
    """sha256 over the Python files of a workload: its module, or all of its package."""
    file = Path(workload.__file__)
    package = file.name == "__init__.py"
    return _digest_of(sorted(file.parent.rglob("*.py")) if package else [file], file.parent)


def _digest(folder: Path) -> str:
    """sha256 over the names and contents of all files but dataset.json."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / DATASET)
    return _digest_of(files, folder)


def _digest_of(files: list[Path], folder: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder)}\0{content}\n".encode())
    return digest.hexdigest()
