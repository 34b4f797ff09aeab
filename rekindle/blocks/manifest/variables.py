"""Environment variables with the prefix REKINDLE_. For example, REKINDLE_TRAIN__WORKERS=3 sets
train.workers of a config."""

from collections.abc import Iterable

from rekindle.errors import ConfigError

VARIABLE_PREFIX = "REKINDLE_"
# names (without the prefix) of variables that configure a process instead of a key of the config
PROCESS_SETTINGS = (
    *("CACHE", "DEADLINE", "ENDPOINT", "GRACE", "HOME", "IMAGE"),
    *("METRICS", "NOTICE", "PATH", "SECRET", "SHM", "TOKEN"),
)


def sets_config(variable_name: str) -> bool:
    """Return True if the environment variable sets a key of the config."""
    setting_name = variable_name.removeprefix(VARIABLE_PREFIX)
    return (
        variable_name.startswith(VARIABLE_PREFIX)
        and setting_name not in PROCESS_SETTINGS
        and not setting_name.startswith("TEST_")
    )


def check_process_settings(variable_names: Iterable[str]) -> None:
    """Raise ConfigError if an environment variable looks like a misspelt name of PROCESS_SETTINGS.
    If the variable were ignored, the process could use the wrong home folder or project."""
    for variable_name in filter(sets_config, variable_names):
        # difflib is imported only in this function, because the import would slow down `rekindle
        # --help`
        from difflib import get_close_matches

        similar_names = get_close_matches(
            variable_name.removeprefix(VARIABLE_PREFIX), PROCESS_SETTINGS, 1, cutoff=0.8
        )
        if similar_names:
            raise ConfigError(
                f"{variable_name} is not a variable of Rekindle. Did you mean"
                f' "{VARIABLE_PREFIX}{similar_names[0]}"?'
            )
