"""A config file, checked: default < file < environment < --set, and for every value where it came from.

    name: demo
    train: {workers: 3}            # REKINDLE_TRAIN__WORKERS=4 beats the file, --set train.workers=5 beats both

Each section's model lives beside what it configures; `data` and `model` belong to the workload.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model, field_validator

from argolocal.language.yaml_text import parse, read_text
from argolocal.manifest import cron as crontab
from rekindle import project, variables
from rekindle.blocks.settings import DEFAULTS, ClusterConfig
from rekindle.errors import ConfigError, did_you_mean, rule
from rekindle.gate import Gate, check_bounds
from rekindle.notify import NotifyConfig
from rekindle.release.config import ServeConfig
from rekindle.sections import Section, Setting, known_keys, settings
from rekindle.training.spec import TrainConfig, check_training
from rekindle.workload import DataConfig, load

DEFAULT_PIPELINE = "pipelines.training"
SHOWN = 20  # errors of a config that are told at once
Keys = tuple[str, ...]  # where a value is: ("train", "workers")


def _defaults(section: type[Section]) -> Any:
    return Field(default_factory=partial(section.model_validate, {}))


class ScheduleConfig(Section):
    """When the pipeline runs by itself."""

    cron: str = Field("0 3 * * 1", description="minute, hour, day of the month, month, day of the week (0 is Sunday)")
    timezone: str = Field("UTC", description="of `cron`; daylight saving may skip or double a run")
    deadline_minutes: int = Field(60, ge=1, description="a run that was missed is made up for this long")
    keep_succeeded: int = Field(3, ge=0, description="finished runs kept in the cluster")
    keep_failed: int = Field(3, ge=0, description="failed runs kept in the cluster")
    suspend: bool = Field(False, description="do not run")

    @field_validator("cron")
    @classmethod
    def _cron(cls, text: str) -> str:
        if text.startswith(("@", "TZ=", "CRON_TZ=")):
            raise ValueError("it must have five fields; the time zone is schedule.timezone")
        if why := crontab.schedule_error(text):
            raise ValueError(why)
        return text

    @field_validator("timezone")
    @classmethod
    def _timezone(cls, name: str) -> str:
        if why := crontab.timezone_error(name):
            raise ValueError(why)
        return name


class Config(Section):
    """Everything a user decides about one pipeline."""

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$",
        description="of the pipeline, its models and its deployment: a DNS label of at most 30 characters",
    )
    pipeline: str = Field(DEFAULT_PIPELINE, description="module whose `build(config)` is the Workflow")
    workload: str = Field(description="module that defines the data, the model and its metrics, such as steps.digits")
    data: DataConfig
    model: Section
    train: TrainConfig = _defaults(TrainConfig)
    gate: Gate = _defaults(Gate)
    serve: ServeConfig = _defaults(ServeConfig)
    schedule: ScheduleConfig = _defaults(ScheduleConfig)
    notify: NotifyConfig = _defaults(NotifyConfig)
    cluster: ClusterConfig = _defaults(ClusterConfig)

    @field_validator("notify", mode="before")
    @classmethod
    def _nobody(cls, notify: Any) -> Any:
        """`notify: null` turns a file's notifications off."""
        return NotifyConfig() if notify is None else notify

    @field_validator("data")
    @classmethod
    def _from_here(cls, data: DataConfig) -> DataConfig:
        """A relative path is meant from where the user is; the step that reads it runs elsewhere."""
        source = data.source if "://" in data.source else str(Path(data.source).expanduser().absolute())
        return data.model_copy(update={"source": source})


@dataclass(frozen=True)
class Loaded:
    """A config and, by dotted path, where each value that is not a default came from."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted path, value, origin) of every value, in the order of the sections; pods as they are rendered."""
        values = self.config.model_dump(mode="json")
        cluster = self.config.cluster
        names = dict.fromkeys([*DEFAULTS, *cluster.pods])
        values["cluster"]["pods"] = {name: cluster.pod(name).model_dump(mode="json") for name in names}
        for keys, value in _leaves(values):
            path = ".".join(keys)
            derived = cluster.origin(keys[2], keys[3]) if keys[:2] == ("cluster", "pods") else ""
            yield path, value, derived or self._origin(path)

    def below(self, path: str) -> str:
        """Where a value below `path` came from; empty if there is none."""
        return next((origin for key, origin in self.origins.items() if key.startswith(f"{path}.")), "")

    def _origin(self, path: str) -> str:
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


def explain(key: str, loaded: Loaded | None = None) -> list[Setting]:
    """Describe the keys at and below `key`, as a loaded config has them: workloads and pipelines add keys of their own.

    Raises ConfigError if no config has such a key.
    """
    return settings(type(loaded.config) if loaded else Config, key)


def load_config(file: Path | str, sets: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Loaded:
    """The config of `file` with its overrides. Raises ConfigError that names each wrong key or value.

    A Python file is a pipeline, with its defaults as config and its own name.
    A relative path that does not exist here is looked up in the project.
    """
    file = project.config(Path(file))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sections: set[str] = set()  # paths with keys below them
    for keys, value, origin in _settings(file, sets, os.environ if environment is None else environment):
        _assign(values, keys, value, origin)
        path = ".".join(keys)
        if path in sections:
            origins = {p: o for p, o in origins.items() if not p.startswith(path + ".")}
        origins[path] = origin
        sections.update(".".join(keys[:depth]) for depth in range(1, len(keys)))
    if "workload" not in values:
        raise ConfigError(f"{file}: workload is missing: name the module of the model, such as workload: steps.digits.")
    model = _schema(str(values["workload"]), str(values.get("pipeline", DEFAULT_PIPELINE)))
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        loaded = Loaded(model.model_construct(), origins)
        errors = error.errors()
        lines = dict.fromkeys(_sentence(model, e, loaded._origin, loaded.below, str(file)) for e in errors[:SHOWN])
        more = [f"{file}: and {len(errors) - SHOWN:,} more errors."] if len(errors) > SHOWN else []
        raise ConfigError("\n".join([*lines, *more])) from error
    workload = load(config.workload)
    check_bounds(config.gate, workload.metrics)
    check_training(config.train, workload)
    return Loaded(config, origins)


@cache
def _schema(workload_name: str, pipeline: str) -> type[Config]:
    """Ours, or the pipeline's own `Config` with more sections, and the two sections of the workload."""
    workload = load(workload_name)
    base = Config
    if pipeline != DEFAULT_PIPELINE:
        base = getattr(project.load(pipeline, "pipeline", ("build",)), "Config", Config)
    if not (isinstance(base, type) and issubclass(base, Config)):
        raise ConfigError(f"{pipeline}.Config is {base!r}: it must be a class that inherits from rekindle.Config.")
    sections: dict[str, Any] = {"data": (workload.Data, ...), "model": (workload.Model, workload.Model())}
    own = {name for name in sections if base.model_fields[name].annotation is not Config.model_fields[name].annotation}
    return create_model("Config", __base__=base, **{name: sections[name] for name in sections.keys() - own})


def _settings(file: Path, sets: Iterable[str], environment: Mapping[str, str]) -> Iterator[tuple[Keys, Any, str]]:
    content = (
        {"pipeline": project.module_of(file), "name": file.stem.replace("_", "-")} if file.suffix == ".py" else None
    )
    for keys, value in _leaves(content or _read(file)):
        yield keys, value, str(file)
    variables.check(environment)
    for name, text in sorted(environment.items()):
        keys = tuple(name.removeprefix(variables.PREFIX).lower().split("__"))
        if variables.sets_config(name):
            yield keys, _parsed(text), name
    for item in sets:
        path, equals, text = item.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set {item}: it must be KEY=VALUE, such as --set train.workers=3.")
        yield tuple(path.strip().split(".")), _parsed(text), f"--set {item}"


def _read(file: Path) -> dict[str, Any]:
    try:
        documents = parse(read_text(file), str(file))
    except FileNotFoundError as error:
        known = {str(path) for path in file.parent.glob("*.yaml")} | project.configs()
        raise ConfigError(f"{file} does not exist: give a config file.{did_you_mean(str(file), known)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give a YAML file.") from error
    values = documents[0] if len(documents) == 1 else documents
    if not isinstance(values, dict):
        content = f"{len(documents)} documents" if len(documents) != 1 else type(values).__name__
        raise ConfigError(f"{file} holds {content}: a config must be a mapping, see configs/demo.yaml.")
    if "apiVersion" in values:
        raise ConfigError(f"{file} is a manifest, not a config: use --manifest {file}.")
    return values


def _parsed(text: str) -> Any:
    """Text stays text (its field's type reads it); only lists, mappings and null are YAML."""
    if text.strip()[:1] in ("[", "{") or text.strip() in ("null", "~"):
        return next(iter(parse(text, repr(text))), None)
    return text


def _leaves(values: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in values.items():
        keys = (*above, str(key))  # a key may hold dots itself: a node's label does
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, keys)
        else:
            yield keys, value


def _assign(values: dict[str, Any], keys: Keys, value: Any, origin: str) -> None:
    *parents, last = keys
    for depth, part in enumerate(parents):
        inner = values.setdefault(part, {})
        if inner is None:  # `train:` with nothing below it
            inner = values[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{origin}: {'.'.join(parents[: depth + 1])} is {inner!r}: it has no keys below it.")
        values = inner
    values[last] = value


def _sentence(model: type[BaseModel], error: Any, origin: Any, origins: Any, file: str) -> str:
    loc = [str(part) for part in error["loc"] if part != "[key]"]
    path, given = ".".join(loc), error["input"]
    source = origin(path)
    where = file if source == "default" else source
    if error["type"] == "extra_forbidden":
        where = origins(path) or where
        known = known_keys(model, loc[:-1])
        hint = did_you_mean(loc[-1], known) or (f" Known: {', '.join(sorted(known))}." if known else "")
        return f"{where}: {path} is not a known key.{hint}"
    if error["type"] == "missing":
        return f"{where}: {path} is missing: it is required."
    if error["type"] in ("model_type", "dict_type") and given is None:
        return f"{where}: {path} is empty: give it keys, or leave it out."
    shown = "" if error["type"] == "value_error" and isinstance(given, Mapping) else f" is {given!r}"
    choices = re.findall(r"'(.+?)'", error["ctx"]["expected"]) if error["type"] == "literal_error" else []
    hint = did_you_mean(str(given), choices)
    return f"{where}: {path or 'the config'}{shown}: {rule(error['msg'])}{hint}"
