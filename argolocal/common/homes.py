"""The home: the directory of runs and their data, .argolocal in the working directory or $ARGOLOCAL_HOME.

A home says what to start, which processes to end and where to send keys, so one that came with a folder from elsewhere
must not be used. `make` leaves an empty file in a home, whose name is a hash of the home's path with a key of the user.
The key is outside, in ~/.local/state/argolocal: nobody else can make such a file, and it counts at one path only.
"""

import errno
import os
import pwd
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from argolocal.common import program
from argolocal.common.files import make_private, write_once
from argolocal.errors import ConfigError

STATE, STATE_DEFAULT = "XDG_STATE_HOME", "~/.local/state"  # of the key
MARK = ".made-by-"


def path() -> Path:
    """The path of the home, whoever made it."""
    return Path(os.environ.get(_variable()) or f".{program.name}")


def current() -> Path:
    """The home that the command uses. Raises ConfigError for one that this user did not make there."""
    home = path()
    check(home)
    return home


def check(home: Path) -> None:
    """Raise ConfigError unless this user made the home; nothing in it is read. One that does not exist is in order."""
    real = Path(os.path.realpath(home))
    if not home.is_absolute() and real != Path(os.path.normpath(Path.cwd() / home)):
        raise ConfigError(f"{home} is a link, and is not followed: set {_variable()}={real} if that is your home.")
    _check_owner(home)
    if _has_entries(real) and not os.path.lexists(real / _mark(real)):
        raise ConfigError(
            f"{home} was not made here by a command of yours, so nothing in it is read or started: remove it, or, if "
            f"it is yours (moved, copied, made by hand or by an earlier version), `{program.name} trust {home}`."
        )


def make(home: Path) -> None:
    """Make a home that only its owner can enter; one that exists becomes so."""
    make_private(home)
    _check_owner(home)  # where others can write, one of them may have been faster
    if not _has_entries(home):
        trust(home)


def trust(home: Path) -> None:
    """Use a home that this user did not make at this place. Raises ConfigError for one that belongs to another user."""
    _check_owner(home)
    (home / _mark(Path(os.path.realpath(home)), make_key=True)).touch(mode=0o600)


def _variable() -> str:
    return program.variable("HOME")


def _check_owner(home: Path) -> None:
    try:
        owner = os.stat(os.path.realpath(home)).st_uid
    except (FileNotFoundError, NotADirectoryError):
        return
    if owner != os.geteuid():
        with suppress(KeyError):
            owner = pwd.getpwuid(owner).pw_name
        raise ConfigError(f"{home} belongs to {owner}: set {_variable()} to a directory of your own.")


def _has_entries(home: Path) -> bool:
    try:
        with os.scandir(home) as entries:
            return any(entries)
    except (FileNotFoundError, NotADirectoryError):  # who writes there says the latter
        return False


def _mark(real: Path, make_key: bool = False) -> str:
    """The name of the file that shows that this user made the home at the path `real`."""
    state = os.environ.get(STATE, "")
    file = Path(state if os.path.isabs(state) else os.path.expanduser(STATE_DEFAULT), program.name, "key")
    try:
        if not file.is_absolute():
            raise FileNotFoundError(errno.ENOENT, "there is no home directory")
        if make_key:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_once(file, os.urandom(32).hex(), 0o600)
        key = file.read_text() if file.exists() else os.urandom(32).hex()  # without a key no home is ours
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}. The key to your homes is kept there: set {STATE} to a directory of your own."
        ) from error
    return MARK + blake2b(os.fsencode(real), key=key.encode(), digest_size=16).hexdigest()
