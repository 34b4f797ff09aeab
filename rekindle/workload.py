"""A workload: the module that defines a model, its data, and its metrics.

`steps/digits.py` is an example. Importing a workload must be cheap (no module-level import of
torch), because every command reads its `Data` and `Model` sections to check a config.
"""

import hashlib
import inspect
import shutil
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from pydantic import BaseModel, Field, field_validator

from argolocal.common.files import check_space, size_of
from argolocal.common.json_text import to_json
from rekindle import families, project
from rekindle.content.dataset import record_files
from rekindle.content.dataset_record import DATASET
from rekindle.content.dataset_record import dataset_facts as dataset_facts
from rekindle.content.dataset_record import read_data_until as read_data_until
from rekindle.content.dataset_record import read_dataset_digest as read_dataset_digest
from rekindle.content.hashes import file_sha256
from rekindle.errors import ConfigError, DataError, did_you_mean
from rekindle.gate import Metric
from rekindle.sections import Section, copy_first_rows, leaves
from rekindle.step import has_zone

if TYPE_CHECKING:
    import torch

SMALL_DISK = "free space, or set TMPDIR to a directory on a larger disk."
POD_PRIVATE = Path("/tmp")


class DataConfig(Section):
    """Base class of a workload's `data:` section."""

    source: str = Field(description="raw data: a file, a folder, an s3:// URI, or simulate://SEED")
    tolerated_rejects: float = Field(
        default=0.001, ge=0, le=1, description="share of bad rows that stops the run"
    )
    minimum_share: float = Field(
        default=0, ge=0, description="minimum share of the last run's rows, in a moving window"
    )

    @field_validator("source")
    @classmethod
    def _name_source(cls, source: str) -> str:
        if not source:
            raise ValueError("it must name the raw data, such as data/power.csv")
        return source

    def at(self, time: datetime) -> Self:
        """Return the section for a run that was scheduled for `time` (UTC), e.g. with the ends of a
        moving window."""
        return self

    @property
    def moves(self) -> bool:
        """True if the data depends on the scheduled time. Default: True if a subclass overrides
        `at`."""
        return type(self).at is not DataConfig.at

    def first_rows(self, rows: int, folder: Path) -> Self | None:
        """Return the section for about the first `rows` rows, or None if this is impossible without
        preparing all rows.

        `rekindle lint`, `check` and `run` try the workload on these rows, which may be written to
        `folder`. Default: the first rows of a CSV, JSON lines or parquet file; None if the data
        moves. A subclass may override this method, for example to return `self`.
        """
        if self.moves:
            target = None
        else:
            target = copy_first_rows(Path(self.source), rows, folder)

        if target:
            return self.model_copy(update={"source": str(target)})

        return None

    def check_source(self) -> None:
        """Raise ConfigError if the source is a path that does not exist, or if a file is in a
        folder that pods cannot access."""
        path = Path(self.source)
        for key, file in [("data.source", path), *leaves(self, "data")]:
            if isinstance(file, Path) and file.exists():
                project.check_visible(key, file, POD_PRIVATE)

        if "://" in self.source or path.exists():
            return

        siblings = {str(path.with_name(sibling.name)) for sibling in path.parent.glob("*")}
        raise ConfigError(
            f"data.source is {self.source!r}: this file or folder does not"
            f" exist.{did_you_mean(self.source, siblings)}"
        )


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`. The engine writes it to `dataset.json` in the dataset.

    `facts` (JSON) are passed to `model` and `predict`, in training and in serving. The fact
    `data_until` (ISO 8601 text with a time zone) is the data cut-off, which the release and the
    server show. `tags` are set on the MLflow run. `newest` is the time of the newest row, see
    docs/time.md.
    """

    rows: int
    rejected: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # sentences about suspicious data
    # property → fraction of rows; the next run warns if it changed
    shares: dict[str, float] = field(default_factory=dict)
    newest: str = ""


@dataclass(frozen=True)
class Refreshed:
    """The result of `refresh`: number of newer rows, new facts of the dataset (with a new
    `data_until`), and instances for verifying the servers (empty: the release's example)."""

    rows: int
    facts: dict[str, Any]
    instances: list[dict[str, Any]] = field(default_factory=list)


class Example(NamedTuple):
    """A test row. `examples` may also yield plain tuples: (instance, truth) or (instance, truth,
    group)."""

    instance: dict[str, Any]  # an instance as a client sends it
    truth: Any
    # group of dependent rows, such as the rows of one customer; rows of a group are resampled
    # together
    group: Any = None
    baseline: Any = None  # prediction of a simple model, for comparison
    # part of the test data that contains this row, such as a week; a metric is the mean over the
    # parts
    part: str | None = None


class Dataset(Sized, Protocol):
    """Samples with random access by index: the result of `batch` depends only on the indices.

    A dataset with state (a curriculum, the cursor of a stream) also defines `state_dict() -> dict`
    and `load_state_dict(dict)`. The state must be small and JSON. Between two steps, it must be
    equal in all workers, although they read different batches. So only `advance(step)` may change
    the state; every worker calls this method after each update, numbered from 1. The state is part
    of every snapshot and checkpoint, and is sent to joining workers.
    """

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """Return the samples at `indices` (int64 [B]); each tensor has the leading dimension B."""
        ...


class Predictor(Protocol):
    """A released model that answers requests and keeps no state between them; see
    rekindle/release/predictor.py. An optional method `warn(request) -> str` returns a sentence for
    the response if its predictions deserve less trust, else "".
    """

    @property
    def Request(self) -> type[BaseModel]:
        """The pydantic model of a request: a list `instances`, and any other fields."""
        ...

    def example(self) -> dict[str, Any]:
        """Return a valid request. It is used for the server's warm-up and shown in its
        documentation."""
        ...

    def predict(self, requests: Sequence[Any]) -> list[list[Any]]:
        """Return one list for each Request, with one JSON value for each of its instances, in
        order. Requests must not influence each other.

        Raises DataError for an invalid request.
        """
        ...


class Workload(Protocol):
    """The names that a workload module must define.

    `predictor(release) -> Predictor` replaces `Instance` and `predict` if a request contains more
    than its instances. `refresh(release, data, out) -> Refreshed | None` updates the serving state
    of a released model with newer data: it writes `out/state/`, which replaces the release's
    `state/`, or returns None without newer data.

    Optional names for the training (docs/training.md): `optimizer(model, train) ->
    torch.optim.Optimizer`, `schedule(step, total) -> float` (both may also take the `model`
    section), `splits = ("train", "validation")`, `measures(model, batch) -> dict[str, float]`.
    `families` replaces `model` (rekindle/families.py). `example_facts`: example of the facts that
    `prepare` returns, with which `rekindle lint` builds the model without data.

    `load(path, facts)` replaces `model`, `dataset` and `loss` if a program trains the model, which
    the section `program` of the config sets: it returns the model, any object, from the result of
    the program, a file or folder.
    """

    Data: type[DataConfig]
    Model: type[Section]
    metrics: Sequence[Metric]  # the first metric compares the candidate with the champion

    def prepare(self, data: Any, out: Path) -> Prepared:
        """Convert the raw data to files in the empty directory `out`. Raises DataError."""
        ...

    def dataset(self, path: Path, split: str) -> Dataset:
        """Return a split of a dataset directory: "train", or "validation" if train.validation is
        "workload"."""
        ...

    def model(self, section: Any, facts: dict[str, Any]) -> "torch.nn.Module":
        """Return a newly initialised model (the caller has seeded torch)."""
        ...

    def loss(self, model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
        """Return the scalar mean loss of a micro-batch."""
        ...

    def examples(self, path: Path) -> Iterable[tuple[Any, ...]] | Sized:
        """Yield the test rows of a dataset: (instance as a client sends it, truth), or an Example.

        `examples(path, champion)` gets the facts of the dataset that the champion was trained on,
        if this is a different dataset, and omits the rows that the champion has seen, since a
        comparison with these would be unfair. A rekindle.Examples has all rows by column, and may
        define its own scoring and extend the report.
        """
        ...

    Instance: type[BaseModel]  # pydantic model of one instance of a request

    def predict(
        self, model: "torch.nn.Module", instances: list[Any], facts: dict[str, Any]
    ) -> list[Any]:
        """Return a JSON value for each Instance, in order; the model is in eval mode."""
        ...


REQUIRED = ("Data", "Model", "metrics", "prepare", "dataset", "loss", "examples")
# required only if Rekindle, not a program of the user, trains the model
TRAINED = ("dataset", "loss")
LOAD = "load"
# also required unless the workload defines `predictor`
SERVED = ("Instance", "predict")
# function → its required arguments; includes optional functions
ARGUMENTS = {
    **{"prepare": ("data", "out"), "dataset": ("path", "split"), "model": ("section", "facts")},
    **{"loss": ("model", "batch"), "measures": ("model", "batch"), "examples": ("path",)},
    LOAD: ("path", "facts"),
    **{
        "predict": ("model", "instances", "facts"),
        "optimizer": ("model", "train"),
        "schedule": ("step", "total"),
    },
    **{"predictor": ("release",), "refresh": ("release", "data", "out")},
}
# function → its optional arguments
OPTIONAL = {"examples": ("champion",), "optimizer": ("section",), "schedule": ("section",)}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load(name: str) -> Workload:
    """Import the workload module `name`. Raises ConfigError if the module cannot be imported or
    lacks a required name."""
    workload = project.load(name, "workload", ())
    project.load(name, "workload", _list_required_names(name, workload))
    missing_names = [attribute for attribute in SERVED if not hasattr(workload, attribute)]
    if missing_names and not hasattr(workload, "predictor"):
        raise ConfigError(
            f'workload "{name}" lacks {", ".join(missing_names)}: it must define'
            f" {' and '.join(SERVED)} for evaluation and serving, or a predictor of its own (see"
            " docs/your-own-model.md)."
        )

    metrics = workload.metrics
    if not isinstance(metrics, (tuple, list)) or not all(
        isinstance(metric, Metric) for metric in metrics
    ):
        raise ConfigError(
            f'workload "{name}": metrics is {metrics!r}: it must be a tuple, such as'
            " (Metric(...),)."
        )

    names = [metric.name for metric in metrics]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f'workload "{name}": metrics has the names {names}: define metrics, with unique names.'
        )

    for attribute, base in (("Data", DataConfig), ("Model", Section), ("Instance", BaseModel)):
        value = getattr(workload, attribute, base)
        if not (isinstance(value, type) and issubclass(value, base)):
            raise ConfigError(
                f'workload "{name}": {attribute} is {value!r}: it must be a subclass of'
                f" {base.__name__}."
            )

    facts = getattr(workload, "example_facts", {})
    if not isinstance(facts, dict):
        raise ConfigError(f'workload "{name}": example_facts is {facts!r}: it must be a dict.')

    for label in (metric.name for metric in metrics if metric.function is None):
        raise ConfigError(
            f'workload "{name}": metric {label} lacks a function: Metric({label!r}, function).'
        )

    if families.has_model(workload):
        families.check(name, workload)

    for label, function, arguments in families.iterate_functions(workload):
        _check_arguments(name, label, function, arguments)

    for function, names in ARGUMENTS.items():
        if takes_optional_argument(workload, function):
            optional_arguments = OPTIONAL[function]
        else:
            optional_arguments = ()

        _check_arguments(
            name, function, getattr(workload, function, None), (*names, *optional_arguments)
        )

    _check_spelling(name, workload)
    return cast(Workload, workload)


def _list_required_names(name: str, workload: object) -> tuple[str, ...]:
    """Return the names that the workload must define. Raises ConfigError if it defines neither a
    model nor `load`."""
    others = tuple(attribute for attribute in REQUIRED if attribute not in TRAINED)
    has_others = all(hasattr(workload, attribute) for attribute in others)

    if hasattr(workload, LOAD) and not families.has_model(workload):
        return others
    if has_others and not families.has_model(workload):
        raise ConfigError(
            f'workload "{name}" defines neither model nor families nor load: it must define model'
            " (or families), dataset and loss if Rekindle trains it, or load(path, facts) if a"
            " program trains it (see docs/your-own-model.md)."
        )
    return REQUIRED


def check_program(name: str) -> None:
    """Raise ConfigError unless the workload `name` defines `load`, which loads the result of a
    program."""
    workload = load(name)
    if not hasattr(workload, LOAD):
        raise ConfigError(
            f'workload "{name}" does not define load(path, facts), but the config has a section'
            " `program`: define load, which returns the model from the result of the program, or"
            " remove the section."
        )


def takes_optional_argument(workload: object, name: str) -> bool:
    """Return True if the workload's function `name` takes its optional argument (OPTIONAL)."""
    function = getattr(workload, name, None)
    if name not in OPTIONAL or not callable(function):
        return False
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.kind in POSITIONAL for parameter in parameters) > len(ARGUMENTS[name])


def takes_champion_facts(workload: object) -> bool:
    """Return True if `examples` takes the facts of the dataset that the champion was trained on."""
    return takes_optional_argument(workload, "examples")


def get_training_function(workload: object, name: str, section: object) -> Any:
    """Return the workload's function `optimizer` or `schedule`, with its optional argument set to
    the `model` section if it has one; None if the workload does not define it."""
    function: Any = getattr(workload, name, None)
    if takes_optional_argument(workload, name):
        return lambda *arguments: function(*arguments, section)
    return function


def _check_spelling(name: str, workload: object) -> None:
    """Raise ConfigError if a function looks like a misspelt optional function: a similar name and
    the same arguments as one that is missing."""
    undefined_names = {
        function
        for function in ARGUMENTS
        if function != "model" and not hasattr(workload, function)
    }

    for attribute, value in vars(workload).items():
        if not inspect.isfunction(value):
            continue

        similar_names = get_close_matches(attribute, undefined_names, n=1, cutoff=0.6)
        arguments = tuple(inspect.signature(value).parameters)
        if similar_names and arguments == ARGUMENTS[similar_names[0]]:
            raise ConfigError(
                f'workload "{name}" defines {attribute}({", ".join(arguments)}), which the engine'
                f' does not call. Did you mean "{similar_names[0]}"? If not, begin the name of the'
                " function with an underscore."
            )


def _check_arguments(
    workload: str, name: str, function: object, arguments: tuple[str, ...]
) -> None:
    """Raise ConfigError unless `function` can be called with these arguments in this order."""
    if function is None:
        return

    if not callable(function):
        raise ConfigError(
            f'workload "{workload}": {name} is {function!r:.100}: it must be a function.'
        )

    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f'workload "{workload}": {name}{inspect.signature(function)} cannot be called as '
            f"{name}({', '.join(arguments)}): {error}. Define it with these arguments."
        ) from error


def prepare(workload: Any, data: DataConfig, out: Path) -> tuple[Prepared, str]:
    """Create the dataset directory `out`; return `Prepared` and the digest. If the preparation
    fails, remove `out`. Raises DataError."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    try:
        # check the disk space first: a dataset is about as large as its source
        if "://" not in data.source:
            check_space("the dataset", size_of(Path(data.source)), out, SMALL_DISK)

        prepared = workload.prepare(data, out)
        _check_prepared(prepared)

        total = prepared.rows + prepared.rejected
        if prepared.rejected > data.tolerated_rejects * total:
            raise DataError(
                f"{prepared.rejected:,} of {total:,} rows were rejected: more than"
                f" data.tolerated_rejects ({data.tolerated_rejects:g} of all rows). Correct the"
                " data, or raise data.tolerated_rejects."
            )

        digest = record_dataset(out, prepared)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise

    return prepared, digest


def record_dataset(out: Path, prepared: Prepared, trained_on: str = "") -> str:
    """Complete the dataset in `out`, and return its digest. Raises DataError.

    This function writes dataset.json, and then the list of all files with their hashes, whose
    sha256 is the digest. Steps that derive a dataset from another dataset call this function; after
    `prepare`, the engine calls it. `trained_on`: set if `out` has only a newer serving state of a
    released model: the digest of this model's dataset.
    """
    _check_prepared(prepared)
    if not any(out.iterdir()):
        raise DataError(
            "`prepare` wrote no file into `out`: it must write the files that `dataset` and"
            " `examples` read."
        )

    record: dict[str, Any] = {
        "rows": prepared.rows,
        "rejected": prepared.rejected,
        "facts": prepared.facts,
    }

    record.update({"digest": trained_on} if trained_on else {})
    try:
        text = to_json(record, indent=1)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the facts of `prepare` are not JSON ({error}): use numbers, texts and lists."
        ) from error

    (out / DATASET).write_text(text + "\n")
    return record_files(out)


def _check_prepared(prepared: object) -> None:
    """Raise DataError unless the result of `prepare` is a Prepared with numbers of rows."""
    if not isinstance(prepared, Prepared):
        raise DataError(
            f"`prepare` returned {type(prepared).__name__}: it must return"
            " rekindle.Prepared(rows=...)."
        )

    for name in ("rows", "rejected"):
        value = getattr(prepared, name)
        if not isinstance(value, int) or value < 0:
            raise DataError(
                f"{name} of `prepare` is {value!r}: it must be a number of rows, such as len(rows)."
            )

    for name, time in (
        ("newest", prepared.newest),
        ("the fact data_until", prepared.facts.get("data_until")),
    ):
        if time and not has_zone(time):
            rule = "it must be an ISO 8601 text with a time zone, such as 2026-11-23T03:00:00+00:00"
            raise DataError(f"{name} of `prepare` is {time!r}: {rule}.")


def digest_files(files: list[Path], folder: Path) -> str:
    """Return the sha256 over the names and contents of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()
