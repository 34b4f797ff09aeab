"""Read and validate a config, and record the origin of each value: default < file < environment <
--set.

    name: demo
    train: {workers: 3}

REKINDLE_TRAIN__WORKERS=4 overrides this file, and --set train.workers=5 overrides both. The class
of each config section is next to the code that the section configures; the workload defines the
sections `data` and `model`.
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

from argolocal.language.yaml_text import parse, read_text
from argolocal.manifest import cron as crontab
from rekindle import families, project
from rekindle.blocks.manifest import variables
from rekindle.blocks.manifest.recorded_secrets import omit_flag_value, reject_secrets
from rekindle.blocks.settings import POD_DEFAULTS, CacheConfig, ClusterConfig
from rekindle.errors import ConfigError, suggest_similar, without_secrets
from rekindle.gate import Gate, check_bounds
from rekindle.program.config import ProgramConfig, check_model_placeholders
from rekindle.program.processes.working_folder import check_program_file
from rekindle.release.serve_config import RetentionConfig, ServeConfig
from rekindle.release.watch.notification import NotifyConfig
from rekindle.sections import (
    Section,
    Setting,
    describe_broken_rule,
    describe_settings,
    iterate_leaves,
    list_valid_keys,
    make_paths_absolute,
)
from rekindle.training.spec import TrainConfig, check_supported_settings
from rekindle.workload import DataConfig, check_program, load

DEFAULT_PIPELINE = "pipelines.training"
# maximum number of wrong keys and values in one error message
MAX_ERRORS = 20
# path of a value in the config, such as ("train", "workers")
KeyPath = tuple[str, ...]


def _default_section(section_type: type[Section]) -> Any:
    return Field(default_factory=partial(section_type.model_validate, {}))


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
    def _check_cron(cls, cron_text: str) -> str:
        if cron_text.startswith(("@", "TZ=", "CRON_TZ=")):
            raise ValueError("it must have five fields; schedule.timezone sets the time zone")
        cron_error = crontab.find_schedule_error(cron_text)
        if cron_error:
            raise ValueError(cron_error)
        return cron_text

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, timezone_name: str) -> str:
        timezone_error = crontab.find_timezone_error(timezone_name)
        if timezone_error:
            raise ValueError(timezone_error)
        return timezone_name


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
        """Replace the config section `notify: null` by the default section, which sends no
        notifications."""
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
        return make_paths_absolute(value, info.field_name or "", folder_for_key)


def _working_directory(key: str) -> Path:
    return Path.cwd()


def resolve_data(
    data_config: DataConfig, folder_for_key: Callable[[str], Path] = _working_directory
) -> DataConfig:
    """Return the section `data_config` with absolute paths. A relative path in `data_config` is
    relative to the folder that `folder_for_key` returns for the path's key."""
    if "://" not in data_config.source:
        source_path = str(folder_for_key("data.source") / Path(data_config.source).expanduser())
        data_config = data_config.model_copy(update={"source": source_path})
    return make_paths_absolute(data_config, "data", folder_for_key)


def relative_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, value) for each value in the user's own sections that is the relative path of an
    existing file."""
    for section_name in _own_section_names(config):
        for key, config_value in iterate_leaves(getattr(config, section_name), section_name):
            if isinstance(config_value, str) and config_value and _is_relative_path(config_value):
                yield key, config_value


def _own_section_names(pipeline_config: Config) -> list[str]:
    """Return the names of the sections that the workload and the pipeline define, not Rekindle."""
    return sorted(
        [*(type(pipeline_config).model_fields.keys() - Config.model_fields.keys()), "data", "model"]
    )


def _is_relative_path(path_text: str) -> bool:
    if "://" in path_text or Path(path_text).is_absolute():
        return False
    candidate_paths = [Path(folder, path_text) for folder in (Path.cwd(), *project.search_path())]
    try:
        return any(
            path.is_file() or ("/" in path_text and path.exists()) for path in candidate_paths
        )
    except (OSError, ValueError):
        # a text that is too long or contains a null byte is not a path
        return False


@dataclass(frozen=True)
class Loaded:
    """A config, and the origins of its values that are not defaults, by dotted path."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (dotted path, value, origin) for every value, in the order of the sections. The
        setting `cluster.pods` gets a row for every kind of pod, with defaults and presets
        applied."""
        config_values = self.config.model_dump(mode="json")
        cluster = self.config.cluster
        pod_kinds = dict.fromkeys([*POD_DEFAULTS, *cluster.pods])

        config_values["cluster"]["pods"] = {
            pod_kind: cluster.pod(pod_kind).model_dump(mode="json") for pod_kind in pod_kinds
        }
        for key_path, value in _iterate_leaves(config_values):
            path = ".".join(key_path)
            if key_path[:2] == ("cluster", "pods"):
                derived_origin = cluster.origin(key_path[2], key_path[3])
            else:
                derived_origin = ""

            yield path, value, derived_origin or self.origin(path)

    def origin_below(self, path: str) -> str:
        """Return the origin of the first config value that is set below `path`; "" if no value
        below `path` is set."""
        return next(
            (origin for key, origin in self.origins.items() if key.startswith(f"{path}.")), ""
        )

    def origin(self, path: str) -> str:
        """Return the origin of the config value at `path`, or of the section or list that contains
        the value."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


def describe_keys(key: str, loaded: Loaded | None = None) -> list[Setting]:
    """Describe the config key `key` and the keys below it. With `loaded`, also describe the keys
    that the workload and the pipeline of this config add.

    Raises ConfigError if `key` is not a key of the config.
    """
    return describe_settings(type(loaded.config) if loaded else Config, key)


def load_config(
    file: Path | str, sets: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Loaded:
    """Load the config in `file`; values in `environment`, then texts in `sets` such as
    "train.workers=3", override the values of the file. Raises a ConfigError that names each wrong
    key or value.

    If `file` is a Python file, it is a pipeline: the config consists of the defaults, and the
    config's `name` is the name of the file. A relative path that does not exist in the working
    directory is looked up in the project. In a file of another project, `data.source` and the
    values of type `Path` in the user's own sections are relative to the other project.
    """
    file = project.find_config_file(Path(file))
    config_values, origins = _merge_settings(
        _iterate_settings(file, sets, os.environ if environment is None else environment)
    )
    if "workload" not in config_values:
        raise ConfigError(_describe_missing_workload(file))

    module_names = _read_module_names(config_values, origins)
    with _prefix_error_lines(origins["workload"]):
        workload = load(module_names["workload"])

    with _prefix_error_lines(origins.get("pipeline", str(file))):
        config_model = _build_config_model(**module_names)

    other_root = project.find_other_project(file)

    def folder_for_key(key: str) -> Path:
        value_origin = Loaded(config_model.model_construct(), origins).origin(key)
        if other_root and value_origin in (str(file), "default"):
            return other_root
        return Path.cwd()

    try:
        config = _validate_config(config_model, config_values, folder_for_key)
    except ValidationError as error:
        loaded = Loaded(config_model.model_construct(), origins)
        raise ConfigError(*_describe_errors(error, loaded, str(file))) from error

    loaded = Loaded(config, origins)
    reject_secrets(config, _own_section_names(config), loaded.origin)
    _check_against_workload(loaded, workload, str(file))
    return loaded


def _merge_settings(
    settings: Iterable[tuple[KeyPath, Any, str]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of all settings, and the origin of each value by its path. A later setting
    replaces an earlier setting of the same key."""
    config_values: dict[str, Any] = {}
    origins_by_path: dict[str, str] = {}
    # paths of sections, that is, of values that contain other keys
    section_paths: set[str] = set()

    for key_path, setting_value, origin in settings:
        _assign_value(config_values, key_path, setting_value, origin)
        path = ".".join(key_path)
        if path in section_paths:
            origins_by_path = {
                existing_path: existing_origin
                for existing_path, existing_origin in origins_by_path.items()
                if not existing_path.startswith(path + ".")
            }

        origins_by_path[path] = origin
        section_paths.update(".".join(key_path[:depth]) for depth in range(1, len(key_path)))

    return config_values, origins_by_path


def _read_module_names(
    config_values: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, str]:
    """Return the modules of the workload and of the pipeline. Raises ConfigError if the name of a
    module is not a text, or is empty."""
    module_names = {
        "workload": config_values["workload"],
        "pipeline": config_values.get("pipeline", DEFAULT_PIPELINE),
    }
    for key, module_name in module_names.items():
        if not isinstance(module_name, str) or not module_name:
            raise ConfigError(
                f"{origins[key]}: {key} is {module_name!r}: it must be the dotted name of a module."
            )
    return module_names


def _check_against_workload(loaded_config: Loaded, workload_module: Any, file: str) -> None:
    """Raise ConfigError if settings of the gate, the training or the families do not fit the
    workload."""
    config = loaded_config.config
    with _prefix_error_lines(loaded_config.origin_below("gate") or file):
        check_bounds(config.gate, workload_module.metrics)

    if config.program:
        with _prefix_error_lines(loaded_config.origin_below("program") or file):
            check_program(config.workload)
            check_program_file(config.program.command)
            check_model_placeholders(config.program, dict(config.model))
        return

    # pipelines without a training, such as batch scoring, need no model
    if not families.has_model(workload_module):
        return

    with _prefix_error_lines(loaded_config.origin("train.validation")):
        check_supported_settings(config.train, workload_module)

    with _prefix_error_lines(loaded_config.origins.get("train.validation", file)):
        families.check_validation(
            families.select_families(workload_module, config.families), config.train.validation
        )


def _describe_errors(error: ValidationError, loaded_config: Loaded, file: str) -> list[str]:
    """Return one line for each wrong key or value of a config."""
    error_details = error.errors()
    error_lines = dict.fromkeys(
        _describe_error(error_detail, loaded_config, file)
        for error_detail in error_details[:MAX_ERRORS]
    )
    if len(error_details) > MAX_ERRORS:
        error_lines[f"{file}: and {len(error_details) - MAX_ERRORS:,} more errors."] = None

    return [without_secrets(line) for line in error_lines]


def _validate_config(
    config_model: type[Config], config_values: dict[str, Any], folder_for_key: Callable[[str], Path]
) -> Config:
    """Validate the values of a config. Raises ValidationError.

    Pydantic looks up a `FilePath` or `DirectoryPath` only in the working directory. If the working
    directory does not contain the path, the path is looked up in the folder that `folder_for_key`
    returns for its key.
    """
    validation_context = {"folder_for_key": folder_for_key}

    try:
        return config_model.model_validate(config_values, context=validation_context)
    except ValidationError as error:
        missing_paths = [
            error_detail
            for error_detail in error.errors()
            if error_detail["type"] in ("path_not_file", "path_not_directory")
        ]
        if not missing_paths:
            raise

    for error_detail in missing_paths:
        *parent_keys, last_key = error_detail["loc"]
        # an error in a union type is skipped, because its location also contains names of types,
        # which are not keys of the config
        with suppress(KeyError, IndexError, TypeError):
            parent_mapping: Any = reduce(operator.getitem, parent_keys, cast(Any, config_values))
            parent_mapping[last_key] = str(
                folder_for_key(".".join(map(str, error_detail["loc"])))
                / Path(parent_mapping[last_key]).expanduser()
            )

    return config_model.model_validate(config_values, context=validation_context)


@contextmanager
def _prefix_error_lines(value_origin: str) -> Iterator[None]:
    """Put the origin of the wrong value in front of each line of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{value_origin}: {line}" for line in error.lines)) from error


@cache
def _build_config_model(workload: str, pipeline: str) -> type[Config]:
    """Return the pydantic model of a config. The model is `Config` or the pipeline's subclass of
    Config, extended by the sections of the workload."""
    workload_module = load(workload)
    base_model = Config

    if pipeline != DEFAULT_PIPELINE:
        base_model = getattr(
            project.load_module(pipeline, "pipeline", ("build",)), "Config", Config
        )

    if not (isinstance(base_model, type) and issubclass(base_model, Config)):
        raise ConfigError(
            f"{pipeline}.Config is {base_model!r}: it must be a class that inherits from"
            " rekindle.Config."
        )

    section_fields: dict[str, Any] = {
        "data": (workload_module.Data, ...),
        "model": (workload_module.Model, workload_module.Model()),
    }
    base_fields = base_model.model_fields

    overridden_sections = {
        name
        for name in section_fields
        if base_fields[name].annotation is not Config.model_fields[name].annotation
    }

    return create_model(
        "Config",
        __base__=base_model,
        **{name: section_fields[name] for name in section_fields.keys() - overridden_sections},
    )


def _iterate_settings(
    file: Path, set_flags: Iterable[str], environment: Mapping[str, str]
) -> Iterator[tuple[KeyPath, Any, str]]:
    if file.suffix == ".py":
        config_values = {
            "pipeline": project.find_module_name(file),
            "name": file.stem.replace("_", "-"),
        }
    else:
        config_values = None

    for key_path, setting_value in _iterate_leaves(config_values or _read_config_file(file)):
        yield key_path, setting_value, str(file)

    variables.check_process_settings(environment)
    for variable_name, value_text in sorted(environment.items()):
        key_path = tuple(variable_name.removeprefix(variables.VARIABLE_PREFIX).lower().split("__"))
        if variables.sets_config(variable_name):
            yield key_path, _parse_value(value_text, variable_name), variable_name

    for set_flag in set_flags:
        path, equals_sign, value_text = set_flag.partition("=")
        if not equals_sign or not path.strip():
            raise ConfigError(
                f"--set {set_flag}: it must be KEY=VALUE, such as --set train.workers=3."
            )

        yield (
            tuple(path.strip().split(".")),
            _parse_value(value_text, f"--set {set_flag}"),
            f"--set {set_flag}",
        )


def _read_config_file(file: Path) -> dict[str, Any]:
    try:
        documents = parse(read_text(file), str(file))
    except FileNotFoundError as error:
        existing_configs = {
            str(path) for path in file.parent.glob("*.yaml")
        } | project.list_config_files()
        raise ConfigError(
            f"{file} does not exist: give a config"
            f" file.{suggest_similar(str(file), existing_configs)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give a YAML file.") from error

    config_values = documents[0] if len(documents) == 1 else documents
    if not isinstance(config_values, dict):
        if len(documents) != 1:
            content_description = f"{len(documents)} documents"
        else:
            content_description = type(config_values).__name__

        raise ConfigError(
            f"{file} holds {content_description}: a config must be a mapping, see"
            " configs/demo.yaml."
        )

    if "apiVersion" in config_values:
        raise ConfigError(f"{file} is a manifest, not a config: use --manifest {file}.")

    return config_values


def _parse_value(value_text: str, value_origin: str) -> Any:
    """Parse the text of a setting: lists, mappings and null as YAML; return other values as text,
    which pydantic converts to the type of the field."""
    if value_text.strip()[:1] in ("[", "{") or value_text.strip() in ("null", "~"):
        return next(iter(parse(value_text, value_origin)), None)
    return value_text


def _iterate_leaves(
    nested_values: Mapping[str, Any], parent_keys: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    for key, nested_value in nested_values.items():
        # the path is a tuple instead of a dotted text, because a key, such as a node label, may
        # contain dots
        key_path = (*parent_keys, str(key))
        if isinstance(nested_value, Mapping) and nested_value:
            yield from _iterate_leaves(nested_value, key_path)
        else:
            yield key_path, nested_value


def _assign_value(
    config_values: dict[str, Any], key_path: KeyPath, setting_value: object, value_origin: str
) -> None:
    *parent_keys, last_key = key_path
    for depth, parent in enumerate(parent_keys):
        inner_mapping = config_values.setdefault(parent, {})
        # a section without a value, such as `train:`, is empty
        if inner_mapping is None:
            inner_mapping = config_values[parent] = {}
        if not isinstance(inner_mapping, dict):
            raise ConfigError(
                f"{value_origin}: {'.'.join(parent_keys[: depth + 1])} is {inner_mapping!r}: it"
                " cannot have keys below it."
            )
        config_values = inner_mapping
    config_values[last_key] = setting_value


def _describe_error(error: ErrorDetails, loaded_config: Loaded, file: str) -> str:
    config_model = type(loaded_config.config)
    key_path = [str(key) for key in error["loc"] if key != "[key]"]
    path = ".".join(key_path)
    invalid_value = error["input"]
    value_origin = loaded_config.origin(path)
    location = file if value_origin == "default" else value_origin

    if error["type"] == "extra_forbidden":
        location = loaded_config.origin_below(path) or location
        valid_keys = list_valid_keys(config_model, key_path[:-1])
        hint = suggest_similar(key_path[-1], valid_keys) or (
            f" Known: {', '.join(sorted(valid_keys))}." if valid_keys else ""
        )

        return f"{location}: {path} is not a known key.{hint}"

    if error["type"] == "missing":
        return f"{location}: {path} is missing: it is required."
    if error["type"] in ("model_type", "dict_type") and invalid_value is None:
        return f"{location}: {path} is empty: give it keys, or remove it."

    if error["type"] == "value_error" and isinstance(invalid_value, Mapping):
        # omit the value from the message, and from the flag that sets it, because it may contain a
        # secret
        value_text = ""
        location = omit_flag_value(location)
    else:
        value_text = f" is {invalid_value!r}"

    if error["type"] == "literal_error":
        choices = re.findall(r"'(.+?)'", error["ctx"]["expected"])
    else:
        choices = []

    hint = suggest_similar(str(invalid_value), choices)
    rule_text = describe_broken_rule(config_model, error)
    return f"{location}: {path or 'the config'}{value_text}: {rule_text}{hint}"


def _describe_missing_workload(file: Path) -> str:
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
