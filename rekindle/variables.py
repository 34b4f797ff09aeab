"""The environment variables that begin with REKINDLE_: REKINDLE_TRAIN__WORKERS=3 sets train.workers of a config."""

from collections.abc import Iterable

from rekindle.errors import ConfigError

PREFIX = "REKINDLE_"
PROCESS = (  # of a process; they set no key of a config
    *("CACHE", "DEADLINE", "ENDPOINT", "GRACE", "HOME", "IMAGE"),
    *("METRICS", "NOTICE", "PATH", "SECRET", "SHM"),
)


def sets_config(name: str) -> bool:
    """True if a variable sets a key of the config."""
    own = name.removeprefix(PREFIX)
    return name.startswith(PREFIX) and own not in PROCESS and not own.startswith("TEST_")


def check(names: Iterable[str]) -> None:
    """Raise ConfigError for a mistyped variable of a process: ignored, it would act on another home or project."""
    for name in filter(sets_config, names):
        from difflib import get_close_matches  # `rekindle --help` does without

        if near := get_close_matches(name.removeprefix(PREFIX), PROCESS, 1, cutoff=0.8):
            raise ConfigError(f'{name} is not a variable of Rekindle. Did you mean "{PREFIX}{near[0]}"?')
