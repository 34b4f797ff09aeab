"""Environment variables with the prefix REKINDLE_: REKINDLE_TRAIN__WORKERS=3 sets train.workers of
a config."""

from collections.abc import Iterable

from rekindle.errors import ConfigError

PREFIX = "REKINDLE_"
# names (without the prefix) of variables that configure a process instead of a key of the config
PROCESS_SETTINGS = (
    *("CACHE", "DEADLINE", "ENDPOINT", "GRACE", "HOME", "IMAGE"),
    *("METRICS", "NOTICE", "PATH", "SECRET", "SHM", "TOKEN"),
)


def sets_config(name: str) -> bool:
    """Return True if the variable sets a key of the config."""
    suffix = name.removeprefix(PREFIX)
    return (
        name.startswith(PREFIX)
        and suffix not in PROCESS_SETTINGS
        and not suffix.startswith("TEST_")
    )


def check(names: Iterable[str]) -> None:
    """Raise ConfigError for a misspelt variable that configures a process; if it were ignored, the
    wrong home or project could be used."""
    for name in filter(sets_config, names):
        # imported only here, because difflib would slow down `rekindle --help`
        from difflib import get_close_matches

        similar_names = get_close_matches(
            name.removeprefix(PREFIX), PROCESS_SETTINGS, 1, cutoff=0.8
        )
        if similar_names:
            raise ConfigError(
                f'{name} is not a variable of Rekindle. Did you mean "{PREFIX}{similar_names[0]}"?'
            )
