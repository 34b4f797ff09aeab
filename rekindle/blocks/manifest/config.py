"""Read and validate a config, and record the origin of each value: default < file < environment <
--set.

    name: demo
    train: {workers: 3}

REKINDLE_TRAIN__WORKERS=4 overrides this file, and --set train.workers=5 overrides both. The class
of each section is next to the code that it configures; the workload defines the sections `data` and
`model`.
"""

import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, cast

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_core import ErrorDetails

from argolocal.common.addresses import AFTER_HOST, SECRET_NAME
from argolocal.common.environment import names_secret
from argolocal.language.yaml_text import parse, read_text
from argolocal.manifest import cron as crontab
from rekindle import families, project
from rekindle.blocks.manifest import variables
from rekindle.blocks.settings import POD_DEFAULTS, CacheConfig, ClusterConfig
from rekindle.errors import ConfigError, did_you_mean, without_secrets
from rekindle.gate import Gate, check_bounds
from rekindle.program.config import ProgramConfig, check_model_placeholders
from rekindle.program.processes.working_folder import check_file
from rekindle.release.serve_config import RetentionConfig, ServeConfig
from rekindle.release.watch.notification import NotifyConfig
from rekindle.sections import (
    Section,
    Setting,
    absolute_paths,
    broken_rule,
    known_keys,
    leaves,
    settings,
)
from rekindle.training.spec import TrainConfig, check_supported_settings
from rekindle.workload import DataConfig, check_program, load

DEFAULT_PIPELINE = "pipelines.training"
# Matches a URL with a password, or with a signature or token in its query, fragment or path; a
# variable such as $(PASSWORD) is not a match. The password may contain slashes and spaces; the host
# of an address without a scheme may precede the digest of an image.
PASSWORD_URL = re.compile(
    rf"""
    (?:(?<=:)|(?<!\S))//[^\s/?#@:]*:(?!\$\(|{AFTER_HOST})[^\n@][^\n]*@[\w.\[-]
    | ^[^\s/?#@:]+:(?!\$\()[^\s/@]+@(?!sha(?:256|512):)[\w.-]+(?:[:/]|$)
    | [?&;\#]{SECRET_NAME}=(?!\$\()[^&\s]
    """,
    re.IGNORECASE | re.VERBOSE,
)
MAX_ERRORS = 20  # maximum number of errors in one message
KeyPath = tuple[str, ...]  # path of a value in the config, such as ("train", "workers")


def _default_section(section: type[Section]) -> Any:
    return Field(default_factory=partial(section.model_validate, {}))


class ScheduleConfig(Section):
    """The schedule of the pipeline on a cluster."""

    cron: str = Field(
        "0 3 * * 1",
        description="minute, hour, day of the month, month, day of the week (0 is Sunday)",
    )
    timezone: str = Field(
        "UTC", description="time zone of `cron`; daylight saving may skip or double a run"
    )
    deadline_minutes: int = Field(
        60, ge=1, description="number of minutes that a missed run may start late"
    )
    keep_succeeded: int = Field(
        3, ge=0, description="number of succeeded runs to keep in the cluster"
    )
    keep_failed: int = Field(3, ge=0, description="number of failed runs to keep in the cluster")
    suspend: bool = Field(False, description="suspend the schedule")

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, text: str) -> str:
        if text.startswith(("@", "TZ=", "CRON_TZ=")):
            raise ValueError("it must have five fields; schedule.timezone sets the time zone")
        reason = crontab.schedule_error(text)
        if reason:
            raise ValueError(reason)
        return text

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, name: str) -> str:
        reason = crontab.timezone_error(name)
        if reason:
            raise ValueError(reason)
        return name


class Config(Section):
    """All settings of one pipeline."""

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$",
        description=(
            "name of the pipeline, its models and its deployment: a DNS label of at most 30"
            " characters"
        ),
    )
    pipeline: str = Field(
        DEFAULT_PIPELINE, description="module whose `build(config)` returns the Workflow"
    )
    workload: str = Field(
        description="module that defines the data, the model and its metrics, such as steps.digits"
    )
    families: list[str] = Field(
        default_factory=list,
        description="families of the workload to train; validation chooses one (empty: all)",
    )
    data: DataConfig
    model: Section
    program: ProgramConfig | None = Field(
        None, description="a training program of your own, in place of the workload's model"
    )
    train: TrainConfig = _default_section(TrainConfig)
    gate: Gate = _default_section(Gate)
    serve: ServeConfig = _default_section(ServeConfig)
    schedule: ScheduleConfig = _default_section(ScheduleConfig)
    notify: NotifyConfig = _default_section(NotifyConfig)
    cache: CacheConfig = _default_section(CacheConfig)
    retention: RetentionConfig = _default_section(RetentionConfig)
    cluster: ClusterConfig = _default_section(ClusterConfig)

    @field_validator("notify", mode="before")
    @classmethod
    def _accept_null_notify(cls, notify: object) -> object:
        """Replace `notify: null` by the default section, which sends no notifications."""
        if notify is None:
            return NotifyConfig()
        return notify

    @field_validator("*")
    @classmethod
    def _resolve_paths(cls, value: object, info: ValidationInfo) -> object:
        """Make relative paths absolute, because the steps that use them run in another working
        directory."""
        folder_for_key = (info.context or {}).get("folder_for_key", _working_directory)
        if isinstance(value, DataConfig):
            return resolve_data(value, folder_for_key)
        return absolute_paths(value, info.field_name or "", folder_for_key)


def _working_directory(key: str) -> Path:
    return Path.cwd()


def resolve_data(
    data: DataConfig, folder_for_key: Callable[[str], Path] = _working_directory
) -> DataConfig:
    """Return the section `data` with absolute paths. A relative path is relative to the folder that
    `folder_for_key` returns for its key."""
    if "://" not in data.source:
        source = str(folder_for_key("data.source") / Path(data.source).expanduser())
        data = data.model_copy(update={"source": source})
    return absolute_paths(data, "data", folder_for_key)


def relative_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, value) for each value in the user's own sections that is the relative path of an
    existing file."""
    for section in _own_sections(config):
        for key, value in leaves(getattr(config, section), section):
            if isinstance(value, str) and value and _is_relative_path(value):
                yield key, value


def _own_sections(config: Config) -> list[str]:
    """Return the names of the sections that the workload and the pipeline define."""
    return sorted(
        [*(type(config).model_fields.keys() - Config.model_fields.keys()), "data", "model"]
    )


def _is_relative_path(text: str) -> bool:
    if "://" in text or Path(text).is_absolute():
        return False
    paths = [Path(folder, text) for folder in (Path.cwd(), *project.search_path())]
    try:
        return any(path.is_file() or ("/" in text and path.exists()) for path in paths)
    except (OSError, ValueError):  # a text that is too long or contains a null byte is not a path
        return False


@dataclass(frozen=True)
class Loaded:
    """A config, and the origins of its values that are not defaults, by dotted path."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (dotted path, value, origin) for every value, in the order of the sections.
        The rows of `cluster.pods` contain every kind of pod, with defaults and presets applied."""
        values = self.config.model_dump(mode="json")
        cluster = self.config.cluster
        names = dict.fromkeys([*POD_DEFAULTS, *cluster.pods])

        values["cluster"]["pods"] = {
            name: cluster.pod(name).model_dump(mode="json") for name in names
        }
        for keys, value in _iterate_leaves(values):
            path = ".".join(keys)
            if keys[:2] == ("cluster", "pods"):
                derived = cluster.origin(keys[2], keys[3])
            else:
                derived = ""

            yield path, value, derived or self.origin(path)

    def origin_below(self, path: str) -> str:
        """Return the origin of the first value that is set below `path`; "" if none is set."""
        return next(
            (origin for key, origin in self.origins.items() if key.startswith(f"{path}.")), ""
        )

    def origin(self, path: str) -> str:
        """Return the origin of the value at `path`, or of the value that contains it."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


def describe_keys(key: str, loaded: Loaded | None = None) -> list[Setting]:
    """Describe the config key `key` and the keys below it; with `loaded`, also the keys that its
    workload and pipeline add.

    Raises ConfigError if no config has such a key.
    """
    return settings(type(loaded.config) if loaded else Config, key)


def load_config(
    file: Path | str, sets: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Loaded:
    """Load the config in `file`; values in `environment`, then texts in `sets` such as
    "train.workers=3", override it. Raises a ConfigError that names each wrong key or value.

    If `file` is a Python file, it is a pipeline: its config consists of the defaults, and its
    `name` is the name of the file. A relative path that does not exist in the working directory is
    looked up in the project. In a file of another project, `data.source` and the values of type
    `Path` in the user's own sections are relative to that project.
    """
    file = project.config(Path(file))
    values, origins = _merge(
        _iterate_settings(file, sets, os.environ if environment is None else environment)
    )
    if "workload" not in values:
        raise ConfigError(_missing_workload(file))

    modules = _module_names(values, origins)
    with _prefix_errors(origins["workload"]):
        workload = load(modules["workload"])

    with _prefix_errors(origins.get("pipeline", str(file))):
        model = _schema(**modules)

    other_root = project.other_project(file)

    def folder_for_key(key: str) -> Path:
        origin = Loaded(model.model_construct(), origins).origin(key)
        if other_root and origin in (str(file), "default"):
            return other_root
        return Path.cwd()

    try:
        config = _validate(model, values, folder_for_key)
    except ValidationError as error:
        loaded = Loaded(model.model_construct(), origins)
        raise ConfigError(*_describe_errors(error, loaded, str(file))) from error

    loaded = Loaded(config, origins)
    _reject_passwords(loaded)
    _check_against_workload(loaded, workload, str(file))
    return loaded


def _merge(
    settings: Iterable[tuple[KeyPath, Any, str]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of all settings, and the origin of each value by its path. A later setting
    replaces earlier ones."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sections: set[str] = set()  # paths of sections, that is, of values that contain other keys

    for keys, value, origin in settings:
        _assign_value(values, keys, value, origin)
        path = ".".join(keys)
        if path in sections:
            origins = {p: o for p, o in origins.items() if not p.startswith(path + ".")}

        origins[path] = origin
        sections.update(".".join(keys[:depth]) for depth in range(1, len(keys)))

    return values, origins


def _module_names(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """Return the modules of the workload and of the pipeline. Raises ConfigError."""
    modules = {"workload": values["workload"], "pipeline": values.get("pipeline", DEFAULT_PIPELINE)}
    for key, module in modules.items():
        if not isinstance(module, str) or not module:
            raise ConfigError(
                f"{origins[key]}: {key} is {module!r}: it must be the dotted name of a module."
            )
    return modules


def _check_against_workload(loaded: Loaded, workload: Any, file: str) -> None:
    """Raise ConfigError if settings of the gate, the training or the families do not fit the
    workload."""
    config = loaded.config
    with _prefix_errors(loaded.origin_below("gate") or file):
        check_bounds(config.gate, workload.metrics)

    if config.program:
        with _prefix_errors(loaded.origin_below("program") or file):
            check_program(config.workload)
            check_file(config.program.command)
            check_model_placeholders(config.program, dict(config.model))
        return

    # pipelines without a training, such as batch scoring, need no model
    if not families.has_model(workload):
        return

    with _prefix_errors(loaded.origin("train.validation")):
        check_supported_settings(config.train, workload)

    with _prefix_errors(loaded.origins.get("train.validation", file)):
        families.check_validation(
            families.select(workload, config.families), config.train.validation
        )


def _describe_errors(error: ValidationError, loaded: Loaded, file: str) -> list[str]:
    """Return one line for each wrong key or value of a config."""
    errors = error.errors()
    lines = dict.fromkeys(_describe_error(each, loaded, file) for each in errors[:MAX_ERRORS])
    if len(errors) > MAX_ERRORS:
        lines[f"{file}: and {len(errors) - MAX_ERRORS:,} more errors."] = None

    return [without_secrets(line) for line in lines]


def _reject_passwords(loaded: Loaded) -> None:
    """Raise ConfigError for a URL with a password or signature: MLflow records the config, and `ps`
    shows it during a run. Also raise ConfigError for a secret in one of the user's own sections."""
    own_sections = _own_sections(loaded.config)
    for key, value in leaves(loaded.config, ""):
        name = key.lstrip(".")
        if isinstance(value, str) and PASSWORD_URL.search(value):
            raise ConfigError(
                f"{without_secrets(loaded.origin(name))}: {name} is a URL with a password or"
                " a signature, which everyone can read who can read the manifest or MLflow:"
                " remove it. A step can read a password from its environment, which has the keys of"
                " the Secret rekindle-s3."
            )
        if name.partition(".")[0] in own_sections and _is_own_secret(name, value):
            raise ConfigError(
                f"{_without_value(loaded.origin(name))}: {name} is a secret, which"
                " everyone can read who can read the manifest or MLflow: remove it. A step can read"
                " it from its environment, which has the keys of the Secret rekindle-s3."
            )


def _without_value(origin: str) -> str:
    """Return an origin such as `--set data.password=VALUE` without the value."""
    if origin.startswith("--set "):
        return origin.partition("=")[0]
    return origin


def _is_own_secret(key: str, value: object) -> bool:
    """Return True if the key of a text in the user's own sections names a secret, and the text is
    not a variable such as $(PASSWORD)."""
    is_text = isinstance(value, str) and value and not value.startswith("$(")
    return bool(is_text) and names_secret(key.rpartition(".")[2])


def _validate(
    model: type[Config], values: dict[str, Any], folder_for_key: Callable[[str], Path]
) -> Config:
    """Validate the values of a config. Raises ValidationError.

    Pydantic looks up a `FilePath` or `DirectoryPath` only in the working directory. If this
    directory does not contain the path, the path is looked up in the folder that `folder_for_key`
    returns for its key.
    """
    context = {"folder_for_key": folder_for_key}

    try:
        return model.model_validate(values, context=context)
    except ValidationError as error:
        missing_paths = [
            item
            for item in error.errors()
            if item["type"] in ("path_not_file", "path_not_directory")
        ]
        if not missing_paths:
            raise

    for item in missing_paths:
        *parents, last_key = item["loc"]
        # skip a value in a union, because its location in the error also contains parts that are
        # not keys
        with suppress(KeyError, IndexError, TypeError):
            holder: Any = reduce(operator.getitem, parents, cast(Any, values))
            holder[last_key] = str(
                folder_for_key(".".join(map(str, item["loc"])))
                / Path(holder[last_key]).expanduser()
            )

    return model.model_validate(values, context=context)


@contextmanager
def _prefix_errors(origin: str) -> Iterator[None]:
    """Put the origin of the wrong value in front of each line of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{origin}: {line}" for line in error.lines)) from error


@cache
def _schema(workload: str, pipeline: str) -> type[Config]:
    """Return the pydantic model of a config: `Config` or the pipeline's subclass of it, extended by
    the sections of the workload."""
    module = load(workload)
    base = Config

    if pipeline != DEFAULT_PIPELINE:
        base = getattr(project.load(pipeline, "pipeline", ("build",)), "Config", Config)

    if not (isinstance(base, type) and issubclass(base, Config)):
        raise ConfigError(
            f"{pipeline}.Config is {base!r}: it must be a class that inherits from rekindle.Config."
        )

    sections: dict[str, Any] = {"data": (module.Data, ...), "model": (module.Model, module.Model())}
    fields = base.model_fields

    overridden = {
        name
        for name in sections
        if fields[name].annotation is not Config.model_fields[name].annotation
    }

    return create_model(
        "Config", __base__=base, **{name: sections[name] for name in sections.keys() - overridden}
    )


def _iterate_settings(
    file: Path, sets: Iterable[str], environment: Mapping[str, str]
) -> Iterator[tuple[KeyPath, Any, str]]:
    if file.suffix == ".py":
        content = {"pipeline": project.module_of(file), "name": file.stem.replace("_", "-")}
    else:
        content = None

    for keys, value in _iterate_leaves(content or _read_config_file(file)):
        yield keys, value, str(file)

    variables.check(environment)
    for name, text in sorted(environment.items()):
        keys = tuple(name.removeprefix(variables.PREFIX).lower().split("__"))
        if variables.sets_config(name):
            yield keys, _parse_value(text, name), name

    for item in sets:
        path, equals, text = item.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set {item}: it must be KEY=VALUE, such as --set train.workers=3.")

        yield tuple(path.strip().split(".")), _parse_value(text, f"--set {item}"), f"--set {item}"


def _read_config_file(file: Path) -> dict[str, Any]:
    try:
        documents = parse(read_text(file), str(file))
    except FileNotFoundError as error:
        files = {str(path) for path in file.parent.glob("*.yaml")} | project.configs()
        raise ConfigError(
            f"{file} does not exist: give a config file.{did_you_mean(str(file), files)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give a YAML file.") from error

    values = documents[0] if len(documents) == 1 else documents
    if not isinstance(values, dict):
        if len(documents) != 1:
            content = f"{len(documents)} documents"
        else:
            content = type(values).__name__

        raise ConfigError(
            f"{file} holds {content}: a config must be a mapping, see configs/demo.yaml."
        )

    if "apiVersion" in values:
        raise ConfigError(f"{file} is a manifest, not a config: use --manifest {file}.")

    return values


def _parse_value(text: str, origin: str) -> Any:
    """Parse lists, mappings and null as YAML; return other values as text, which pydantic converts
    to the type of the field."""
    if text.strip()[:1] in ("[", "{") or text.strip() in ("null", "~"):
        return next(iter(parse(text, origin)), None)
    return text


def _iterate_leaves(
    values: Mapping[str, Any], parent_keys: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        # the path is a tuple instead of a dotted text, because a key, such as a node label, may
        # contain dots
        keys = (*parent_keys, str(key))
        if isinstance(value, Mapping) and value:
            yield from _iterate_leaves(value, keys)
        else:
            yield keys, value


def _assign_value(values: dict[str, Any], keys: KeyPath, value: object, origin: str) -> None:
    *parents, last = keys
    for depth, parent in enumerate(parents):
        inner = values.setdefault(parent, {})
        if inner is None:  # a section without a value, such as `train:`, is empty
            inner = values[parent] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{origin}: {'.'.join(parents[: depth + 1])} is {inner!r}: it cannot have keys"
                " below it."
            )
        values = inner
    values[last] = value


def _describe_error(error: ErrorDetails, loaded: Loaded, file: str) -> str:
    model = type(loaded.config)
    keys = [str(key) for key in error["loc"] if key != "[key]"]
    path = ".".join(keys)
    value = error["input"]
    source = loaded.origin(path)
    location = file if source == "default" else source

    if error["type"] == "extra_forbidden":
        location = loaded.origin_below(path) or location
        valid = known_keys(model, keys[:-1])
        hint = did_you_mean(keys[-1], valid) or (
            f" Known: {', '.join(sorted(valid))}." if valid else ""
        )

        return f"{location}: {path} is not a known key.{hint}"

    if error["type"] == "missing":
        return f"{location}: {path} is missing: it is required."
    if error["type"] in ("model_type", "dict_type") and value is None:
        return f"{location}: {path} is empty: give it keys, or remove it."

    if error["type"] == "value_error" and isinstance(value, Mapping):
        # omit the value and the flag that sets it, because both may contain a secret
        value_text = ""
        location = _without_value(location)
    else:
        value_text = f" is {value!r}"

    if error["type"] == "literal_error":
        choices = re.findall(r"'(.+?)'", error["ctx"]["expected"])
    else:
        choices = []

    hint = did_you_mean(str(value), choices)
    return f"{location}: {path or 'the config'}{value_text}: {broken_rule(model, error)}{hint}"


def _missing_workload(file: Path) -> str:
    if file.suffix != ".py":
        return (
            f"{file}: workload is missing: name the module of the model, such as workload:"
            " steps.digits."
        )

    if not re.search(r"\bbuild\b", file.read_text(errors="replace")):
        return (
            f"{file} is not a pipeline, because it has no function build(config): give a config or"
            " a pipeline."
        )

    return (
        f"{file}: this pipeline has no workload: add --set workload=MODULE, or give a config that"
        " names it."
    )
