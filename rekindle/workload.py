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

from argolocal.common.files import count_bytes, require_disk_space
from argolocal.common.json_text import to_json
from rekindle import families, project
from rekindle.content.dataset import record_files
from rekindle.content.dataset_record import DATASET
from rekindle.content.dataset_record import read_data_until as read_data_until
from rekindle.content.dataset_record import read_dataset_digest as read_dataset_digest
from rekindle.content.dataset_record import read_dataset_facts as read_dataset_facts
from rekindle.content.hashes import file_sha256
from rekindle.errors import ConfigError, DataError, suggest_similar
from rekindle.gate import Metric
from rekindle.sections import Section, copy_first_rows, iterate_leaves
from rekindle.step import has_zone

if TYPE_CHECKING:
    import torch

SMALL_DISK_REMEDY = "free space, or set TMPDIR to a directory on a larger disk."
# each pod has its own /tmp, so a pod cannot read files in /tmp of this machine
POD_PRIVATE = Path("/tmp")


class DataConfig(Section):
    """Base class of a workload's `data:` section."""

    source: str = Field(description="raw data: a file, a folder, an s3:// URI, or simulate://SEED")
    tolerated_rejects: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="maximum share of rejected rows; a larger share stops the run",
    )
    minimum_share: float = Field(
        default=0,
        ge=0,
        description="minimum number of rows in a moving window, as a share of the last run's rows",
    )

    @field_validator("source")
    @classmethod
    def _require_source(cls, source: str) -> str:
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
            copied_source = None
        else:
            copied_source = copy_first_rows(Path(self.source), rows, folder)

        if copied_source:
            return self.model_copy(update={"source": str(copied_source)})

        return None

    def check_source(self) -> None:
        """Raise ConfigError if the source is a path that does not exist, or if a file is in a
        folder that pods cannot access."""
        path = Path(self.source)
        for key, file in [("data.source", path), *iterate_leaves(self, "data")]:
            if isinstance(file, Path) and file.exists():
                project.check_visible(key, file, POD_PRIVATE)

        if "://" in self.source or path.exists():
            return

        sibling_paths = {
            str(path.with_name(sibling_path.name)) for sibling_path in path.parent.glob("*")
        }
        raise ConfigError(
            f"data.source is {self.source!r}: this file or folder does not"
            f" exist.{suggest_similar(self.source, sibling_paths)}"
        )


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`. Rekindle writes the object Prepared to `dataset.json` in the
    dataset.

    `facts` (JSON) are passed to `model` and `predict`, in training and in serving. The fact
    `data_until` (ISO 8601 text with a time zone) is the data cut-off, which the release and the
    server show. `tags` are set as tags of the MLflow run. `newest` is the time of the newest row,
    see docs/time.md.
    """

    rows: int
    rejected: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    # sentences about suspicious data
    warnings: list[str] = field(default_factory=list)
    # property → fraction of rows with it; the next run warns if the fraction has changed
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
    """A test row of the dataset. `examples` may also yield plain tuples: (instance, truth) or
    (instance, truth, group)."""

    # an instance as a client sends it
    instance: dict[str, Any]
    truth: Any
    # group of dependent rows, such as the rows of one customer; rows of a group are resampled
    # together
    group: Any = None
    # prediction of a simple model for this row, for comparison
    baseline: Any = None
    # part of the test data that contains this row, such as a week; a metric is the mean over the
    # parts
    part: str | None = None


class Dataset(Sized, Protocol):
    """Samples with random access by index: the result of `batch` depends only on the indices.

    A dataset with state (a curriculum, the cursor of a stream) also defines `state_dict() -> dict`
    and `load_state_dict(dict)`. The state of a dataset must be small and JSON. Between two steps,
    the state must be equal in all workers, although the workers read different batches. Only
    `advance(step)` may change the state of a dataset; every worker calls `advance` after each
    update, with the number of the step, from 1. The state of a dataset is part of every snapshot
    and checkpoint, and is sent to joining workers.
    """

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """Return the samples at `indices` (int64 [B]); each tensor has the leading dimension B."""
        ...


class Predictor(Protocol):
    """A released model that answers requests and keeps no state between them; see
    rekindle/release/predictor.py. An optional method `warn(request) -> str` returns a warning for
    the response if its predictions are less reliable than usual, else "".
    """

    @property
    def Request(self) -> type[BaseModel]:
        """The pydantic model of a request: a list `instances`, and any other fields."""
        ...

    def example(self) -> dict[str, Any]:
        """Return a valid request. The example request is used for the server's warm-up and shown in
        the server's documentation."""
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
    `state/`, or returns None if no newer data exists.

    A workload may define the following optional names for the training (docs/training.md):
    `optimizer(model, train) -> torch.optim.Optimizer`, `schedule(step, total) -> float` (both may
    also take the `model` section), `splits = ("train", "validation")`, `measures(model, batch) ->
    dict[str, float]`. `families` replaces `model` (rekindle/families.py). `example_facts`: example
    of the facts that `prepare` returns, with which `rekindle lint` builds the model without data.

    If the config has a section `program`, the program in this section trains the model. For such a
    config, `load(path, facts)` replaces `model`, `dataset` and `loss`. The function `load` returns
    the model, which may be any object, from the program's result, a file or folder.
    """

    Data: type[DataConfig]
    Model: type[Section]
    # the first metric compares the candidate with the champion
    metrics: Sequence[Metric]

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
        comparison on seen rows would be unfair. A rekindle.Examples has all rows by column, and may
        define its own scoring and extend the report.
        """
        ...

    # pydantic model of one instance of a request
    Instance: type[BaseModel]

    def predict(
        self, model: "torch.nn.Module", instances: list[Any], facts: dict[str, Any]
    ) -> list[Any]:
        """Return a JSON value for each Instance, in order; the model is in eval mode."""
        ...


REQUIRED_NAMES = ("Data", "Model", "metrics", "prepare", "dataset", "loss", "examples")
# names that are required only if Rekindle, not a program of the user, trains the model
TRAINING_NAMES = ("dataset", "loss")
LOAD_FUNCTION = "load"
# names that are required unless the workload defines `predictor`
SERVING_NAMES = ("Instance", "predict")
# function → its required arguments; includes optional functions
FUNCTION_ARGUMENTS = {
    "prepare": ("data", "out"),
    "dataset": ("path", "split"),
    "model": ("section", "facts"),
    "loss": ("model", "batch"),
    "measures": ("model", "batch"),
    "examples": ("path",),
    LOAD_FUNCTION: ("path", "facts"),
    "predict": ("model", "instances", "facts"),
    "optimizer": ("model", "train"),
    "schedule": ("step", "total"),
    "predictor": ("release",),
    "refresh": ("release", "data", "out"),
}
# function → its optional arguments
OPTIONAL_ARGUMENTS = {
    "examples": ("champion",),
    "optimizer": ("section",),
    "schedule": ("section",),
}
POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load(name: str) -> Workload:
    """Import the workload module `name`. Raises ConfigError if the module cannot be imported or
    lacks a required name."""
    workload_module = project.load_module(name, "workload", ())
    project.load_module(name, "workload", _list_required_names(name, workload_module))
    missing_names = [
        attribute_name
        for attribute_name in SERVING_NAMES
        if not hasattr(workload_module, attribute_name)
    ]
    if missing_names and not hasattr(workload_module, "predictor"):
        raise ConfigError(
            f'workload "{name}" lacks {", ".join(missing_names)}: it must define'
            f" {' and '.join(SERVING_NAMES)} for evaluation and serving, or a predictor of its own"
            " (see docs/your-own-model.md)."
        )

    _check_metrics(name, workload_module.metrics)
    _check_attribute_types(name, workload_module)

    if families.has_model(workload_module):
        families.check_families(name, workload_module)

    for label, function, argument_names in families.iterate_functions(workload_module):
        _check_arguments(name, label, function, argument_names)

    for function_name, argument_names in FUNCTION_ARGUMENTS.items():
        if takes_optional_argument(workload_module, function_name):
            optional_arguments = OPTIONAL_ARGUMENTS[function_name]
        else:
            optional_arguments = ()

        _check_arguments(
            name,
            function_name,
            getattr(workload_module, function_name, None),
            (*argument_names, *optional_arguments),
        )

    _check_spelling(name, workload_module)
    return cast(Workload, workload_module)


def _check_metrics(workload_name: str, metrics: object) -> None:
    """Raise ConfigError unless `metrics` of the workload `workload_name` is a sequence of Metrics
    that have unique names and functions."""
    if not isinstance(metrics, (tuple, list)) or not all(
        isinstance(workload_metric, Metric) for workload_metric in metrics
    ):
        raise ConfigError(
            f'workload "{workload_name}": metrics is {metrics!r}: it must be a tuple, such as'
            " (Metric(...),)."
        )

    metric_names = [workload_metric.name for workload_metric in metrics]
    if not metric_names or len(set(metric_names)) != len(metric_names):
        raise ConfigError(
            f'workload "{workload_name}": metrics has the names {metric_names}: define metrics,'
            " with unique names."
        )

    for workload_metric in metrics:
        if workload_metric.function is None:
            metric_name = workload_metric.name
            raise ConfigError(
                f'workload "{workload_name}": metric {metric_name} lacks a function:'
                f" Metric({metric_name!r}, function)."
            )


def _check_attribute_types(workload_name: str, workload_module: object) -> None:
    """Raise ConfigError if an attribute of the workload that must be a class or a dict has another
    type."""
    for attribute_name, base_class in (
        ("Data", DataConfig),
        ("Model", Section),
        ("Instance", BaseModel),
    ):
        attribute_value = getattr(workload_module, attribute_name, base_class)
        if not (isinstance(attribute_value, type) and issubclass(attribute_value, base_class)):
            raise ConfigError(
                f'workload "{workload_name}": {attribute_name} is {attribute_value!r}: it must be a'
                f" subclass of {base_class.__name__}."
            )

    example_facts = getattr(workload_module, "example_facts", {})
    if not isinstance(example_facts, dict):
        raise ConfigError(
            f'workload "{workload_name}": example_facts is {example_facts!r}: it must be a dict.'
        )


def _list_required_names(workload_name: str, workload_module: object) -> tuple[str, ...]:
    """Return the names that the workload must define. Raises ConfigError if the workload defines
    neither a model nor `load`."""
    other_names = tuple(
        attribute_name for attribute_name in REQUIRED_NAMES if attribute_name not in TRAINING_NAMES
    )
    has_other_names = all(
        hasattr(workload_module, attribute_name) for attribute_name in other_names
    )

    if hasattr(workload_module, LOAD_FUNCTION) and not families.has_model(workload_module):
        return other_names
    if has_other_names and not families.has_model(workload_module):
        raise ConfigError(
            f'workload "{workload_name}" defines neither model nor families nor load: it must'
            " define model (or families), dataset and loss if Rekindle trains it, or load(path,"
            " facts) if a program trains it (see docs/your-own-model.md)."
        )
    return REQUIRED_NAMES


def check_program(workload_name: str) -> None:
    """Raise ConfigError unless the workload `workload_name` defines `load`, which loads the result
    of a program."""
    workload_module = load(workload_name)
    if not hasattr(workload_module, LOAD_FUNCTION):
        raise ConfigError(
            f'workload "{workload_name}" does not define load(path, facts), but the config has a'
            " section `program`: define load, which returns the model from the result of the"
            " program, or remove the section."
        )


def takes_optional_argument(workload_module: object, function_name: str) -> bool:
    """Return True if the workload's function `function_name` takes its optional argument
    (OPTIONAL_ARGUMENTS)."""
    optional_function = getattr(workload_module, function_name, None)
    if function_name not in OPTIONAL_ARGUMENTS or not callable(optional_function):
        return False
    function_parameters = inspect.signature(optional_function).parameters.values()
    return sum(
        function_parameter.kind in POSITIONAL_KINDS for function_parameter in function_parameters
    ) > len(FUNCTION_ARGUMENTS[function_name])


def takes_champion_facts(workload_module: object) -> bool:
    """Return True if `examples` takes the facts of the dataset that the champion was trained on."""
    return takes_optional_argument(workload_module, "examples")


def get_training_function(
    workload_module: object, function_name: str, model_section: object
) -> Any:
    """Return the workload's function `optimizer` or `schedule`, with its optional argument set to
    the `model` section if the function has one; None if the workload does not define the
    function."""
    training_function: Any = getattr(workload_module, function_name, None)
    if takes_optional_argument(workload_module, function_name):
        return lambda *arguments: training_function(*arguments, model_section)
    return training_function


def _check_spelling(workload_name: str, workload_module: object) -> None:
    """Raise ConfigError if a function of the workload looks like a misspelt optional function: the
    function has a similar name and the same arguments as an optional function that the workload
    does not define."""
    undefined_names = {
        function_name
        for function_name in FUNCTION_ARGUMENTS
        if function_name != "model" and not hasattr(workload_module, function_name)
    }

    for attribute_name, attribute_value in vars(workload_module).items():
        if not inspect.isfunction(attribute_value):
            continue

        similar_names = get_close_matches(attribute_name, undefined_names, n=1, cutoff=0.6)
        argument_names = tuple(inspect.signature(attribute_value).parameters)
        if similar_names and argument_names == FUNCTION_ARGUMENTS[similar_names[0]]:
            raise ConfigError(
                f'workload "{workload_name}" defines'
                f" {attribute_name}({', '.join(argument_names)}), which"
                " the engine"
                f' does not call. Did you mean "{similar_names[0]}"? If not, begin the name of the'
                " function with an underscore."
            )


def _check_arguments(
    workload_name: str,
    function_name: str,
    workload_function: object,
    argument_names: tuple[str, ...],
) -> None:
    """Raise ConfigError unless `workload_function` can be called with the given arguments in their
    order."""
    if workload_function is None:
        return

    if not callable(workload_function):
        raise ConfigError(
            f'workload "{workload_name}": {function_name} is {workload_function!r:.100}: it must'
            " be a function."
        )

    try:
        inspect.signature(workload_function).bind(*argument_names)
    except TypeError as error:
        raise ConfigError(
            f'workload "{workload_name}": {function_name}{inspect.signature(workload_function)}'
            " cannot be"
            f" called as {function_name}({', '.join(argument_names)}): {error}. Define it with"
            " these"
            " arguments."
        ) from error


def prepare(
    workload_module: Any, data_config: DataConfig, dataset_folder: Path
) -> tuple[Prepared, str]:
    """Create the dataset directory `dataset_folder`; return `Prepared` and the digest. If the
    preparation fails, remove `dataset_folder`. Raises DataError."""
    shutil.rmtree(dataset_folder, ignore_errors=True)
    dataset_folder.mkdir(parents=True)

    try:
        # check the disk space first, because a dataset is about as large as its source
        if "://" not in data_config.source:
            require_disk_space(
                "the dataset",
                count_bytes(Path(data_config.source)),
                dataset_folder,
                SMALL_DISK_REMEDY,
            )

        prepared_dataset = workload_module.prepare(data_config, dataset_folder)
        _check_prepared(prepared_dataset)

        total_rows = prepared_dataset.rows + prepared_dataset.rejected
        if prepared_dataset.rejected > data_config.tolerated_rejects * total_rows:
            raise DataError(
                f"{prepared_dataset.rejected:,} of {total_rows:,} rows were rejected: more than"
                f" data.tolerated_rejects ({data_config.tolerated_rejects:g} of all rows). Correct"
                " the data, or raise data.tolerated_rejects."
            )

        dataset_digest = record_dataset(dataset_folder, prepared_dataset)
    except BaseException:
        shutil.rmtree(dataset_folder, ignore_errors=True)
        raise

    return prepared_dataset, dataset_digest


def record_dataset(out: Path, prepared: Prepared, trained_on: str = "") -> str:
    """Complete the dataset in `out`, and return its digest. Raises DataError.

    record_dataset writes dataset.json, and then the list of all files with their hashes, whose
    sha256 is the digest. Steps that derive a dataset from another dataset call this function; after
    `prepare`, Rekindle calls it. `trained_on`: if `out` only contains a newer serving state for a
    released model, the digest of the dataset on which this model was trained.
    """
    _check_prepared(prepared)
    if not any(out.iterdir()):
        raise DataError(
            "`prepare` wrote no file into `out`: it must write the files that `dataset` and"
            " `examples` read."
        )

    dataset_record: dict[str, Any] = {
        "rows": prepared.rows,
        "rejected": prepared.rejected,
        "facts": prepared.facts,
    }

    if trained_on:
        dataset_record["digest"] = trained_on

    try:
        text = to_json(dataset_record, indent=1)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the facts of `prepare` are not JSON ({error}): use numbers, texts and lists."
        ) from error

    (out / DATASET).write_text(text + "\n")
    return record_files(out)


def _check_prepared(prepared_dataset: object) -> None:
    """Raise DataError unless the result of `prepare` is a Prepared with numbers of rows."""
    if not isinstance(prepared_dataset, Prepared):
        raise DataError(
            f"`prepare` returned {type(prepared_dataset).__name__}: it must return"
            " rekindle.Prepared(rows=...)."
        )

    for name in ("rows", "rejected"):
        row_count = getattr(prepared_dataset, name)
        if not isinstance(row_count, int) or row_count < 0:
            raise DataError(
                f"{name} of `prepare` is {row_count!r}: it must be a number of rows, such as"
                " len(rows)."
            )

    for name, time_text in (
        ("newest", prepared_dataset.newest),
        ("the fact data_until", prepared_dataset.facts.get("data_until")),
    ):
        if time_text and not has_zone(time_text):
            time_rule = (
                "it must be an ISO 8601 text with a time zone, such as 2026-11-23T03:00:00+00:00"
            )
            raise DataError(f"{name} of `prepare` is {time_text!r}: {time_rule}.")


def digest_files(hashed_files: list[Path], folder: Path) -> str:
    """Return the sha256 over the names and contents of files."""
    sha256_hash = hashlib.sha256()
    for path in hashed_files:
        sha256_hash.update(f"{path.relative_to(folder)}\0{file_sha256(path)}\n".encode())
    return sha256_hash.hexdigest()
