"""The home is the directory of runs and their data. The home is $ARGOLOCAL_HOME or, by default,
.argolocal in the working directory.

The files of a home (the directory of runs and their data) decide which programs start, which
processes end and where credentials are sent, so commands must not use a home that was copied from
elsewhere. `create_home` writes an owner mark into each home: an empty file whose name is a keyed
hash of the home's path. The key of the hash is in the user's ~/.local/state/argolocal, so other
users cannot make an owner mark, and a mark is invalid at another path.
"""

import errno
import os
import pwd
import stat
from contextlib import suppress
from hashlib import blake2b
from html import escape
from pathlib import Path

from argolocal.common import program
from argolocal.common.files import make_private_directory, write_atomically, write_if_missing
from argolocal.errors import ConfigError

STATE_HOME_VARIABLE = "XDG_STATE_HOME"
DEFAULT_STATE_HOME = "~/.local/state"
OWNER_MARK_PREFIX = ".made-by-"


def home_path() -> Path:
    """Return the path of the home, the directory of all runs, without checking it."""
    return Path(os.environ.get(program.environment_variable("HOME")) or f".{program.name}")


def require_home() -> Path:
    """Return the home, the directory of runs, that commands use. Raises ConfigError unless this
    user made the home (the directory of all runs) at its current path."""
    home = home_path()
    require_owned_home(home)
    return home


def require_owned_home(home: Path) -> None:
    """Raise ConfigError if the home, the directory of all runs, exists and this user did not make
    it. The contents of the files in the home directory of all runs are not read."""
    real_path = Path(os.path.realpath(home))
    if not home.is_absolute() and real_path != Path(os.path.normpath(Path.cwd() / home)):
        raise ConfigError(
            f"{home} is a link, and is not followed: "
            f"set {program.environment_variable('HOME')}={real_path} if that folder is yours."
        )

    _check_owner(home)
    if _has_entries(real_path) and not os.path.lexists(real_path / _owner_mark_name(real_path)):
        raise ConfigError(
            f"{home} was not created here by your own commands, so it is not used: remove it, or,"
            " if it is yours (moved, copied, made by hand or by an earlier version), run"
            f" `{program.name} trust {home}`."
        )


def create_home(home: Path) -> None:
    """Make a home (a directory of runs) that only its owner can enter, or restrict the permissions
    of an existing home."""
    _check_owner(home)
    make_private_directory(home)
    # check the owner again, because another user may have made the directory in the meantime
    _check_owner(home)
    if not _has_entries(home):
        trust_home(home)


def trust_home(home: Path) -> None:
    """Mark a home (a directory of runs) that was made elsewhere as trusted. Raises ConfigError if
    the home, the directory of all runs, belongs to another user."""
    _check_owner(home)
    (home / _owner_mark_name(Path(os.path.realpath(home)), creates_key=True)).touch(mode=0o600)


def _check_owner(home: Path) -> None:
    remedy = f"remove it, or set {program.environment_variable('HOME')} to a directory of your own."
    try:
        file_status = os.stat(os.path.realpath(home))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:  # for example, `home` is a symbolic link to itself
        problem = f"{os.path.abspath(home)} cannot be used as the home ({error.strerror}): {remedy}"
        raise ConfigError(problem) from error

    if not stat.S_ISDIR(file_status.st_mode):
        raise ConfigError(
            f"{os.path.abspath(home)} is not a directory, so it cannot be the home: {remedy}"
        )

    owner_name: int | str = file_status.st_uid
    if owner_name != os.geteuid():
        with suppress(KeyError):
            owner_name = pwd.getpwuid(owner_name).pw_name

        raise ConfigError(
            f"{home} belongs to {owner_name}: set {program.environment_variable('HOME')} to a"
            " directory of your own."
        )


def _has_entries(home: Path) -> bool:
    try:
        with os.scandir(home) as directory_entries:
            return any(directory_entries)
    except (FileNotFoundError, NotADirectoryError):
        # `home` is missing, or its parent is a file; in the second case, the next write into `home`
        # raises an error.
        return False
    except OSError as error:
        raise ConfigError(
            f"{home} cannot be read ({error.strerror}): make it readable, or set"
            f" {program.environment_variable('HOME')} to a directory of your own."
        ) from error


def _owner_mark_name(real_path: Path, creates_key: bool = False) -> str:
    """Return the name of the file which proves that this user made the home, the directory of all
    runs, at `real_path`. `creates_key`: create the user's key if it does not exist."""
    state_home = os.environ.get(STATE_HOME_VARIABLE, "")
    if not os.path.isabs(state_home):
        state_home = os.path.expanduser(DEFAULT_STATE_HOME)

    key_file = Path(state_home, program.name, "key")

    try:
        if not key_file.is_absolute():
            raise FileNotFoundError(errno.ENOENT, "the user's home directory is unknown")

        if creates_key:
            key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_if_missing(key_file, os.urandom(32).hex(), 0o600)

        if key_file.exists():
            key = key_file.read_text()
        else:
            # If no key is stored, use a random key, with which the mark of every home is invalid.
            key = os.urandom(32).hex()
    except OSError as error:
        raise ConfigError(
            f"{key_file}: {error.strerror}. This file must contain the key that marks your homes: "
            f"set {STATE_HOME_VARIABLE} to a directory of your own."
        ) from error

    return (
        OWNER_MARK_PREFIX
        + blake2b(os.fsencode(real_path), key=key.encode(), digest_size=16).hexdigest()
    )


def write_redirect_page(home: Path, url: str) -> str:
    """Write a file that redirects to the secret `url`, and return its path. Pass this path, and not
    the URL, to the browser, because all local users can see the arguments of a process."""
    create_home(home)
    page_path = home / "page.html"
    page_html = f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">'
    write_atomically(page_path, page_html, 0o600)
    return str(page_path)
