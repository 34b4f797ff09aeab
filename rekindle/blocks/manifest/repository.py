"""Read the git repository of a project without trusting it: git must not start a program that the
repository names.

The configuration, attributes and hooks of a repository can name programs, and no option of git
disables all of them. So git reads the objects, references and index of the repository through a
private git directory, which has no hooks, no remotes and only harmless settings. Objects of other
repositories (alternates) are not read. A repository that contains a FIFO or a device is rejected,
because git would block on it, or read it endlessly. No other module runs git.
"""

import hashlib
import os
import re
import resource
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from argolocal.common.files import read_regular
from argolocal.common.wording import shorten
from rekindle.errors import RekindleError

TIMEOUT_S = 10
CHECKOUT_TIMEOUT_S = 600
MAX_TEXT_BYTES = 1 << 20  # maximum size of a file, such as HEAD, that git or this module parses
# memory limit of git, because a small compressed object may unpack to any size
MAX_MEMORY_BYTES = 2 << 30

# settings for the comparison and checkout of files, whose values cannot name a program or a file
CORE_SETTINGS = (
    "autocrlf",
    "eol",
    "filemode",
    "ignorecase",
    "precomposeunicode",
    "symlinks",
)
HARMLESS_SETTINGS = {
    *(f"core.{name}" for name in CORE_SETTINGS),
    "extensions.objectformat",
    "extensions.refstorage",
}
SETTING_VALUE = re.compile(r"[A-Za-z0-9]*")

DATA_FOLDERS = ("refs", "reftable", "logs")  # folders and files that contain only data
DATA_FILES = ("packed-refs", "shallow", "info/attributes")
# files of a submodule's repository that git reads
READ_FILES = ("HEAD", "commondir", "config", "config.worktree", "index", "packed-refs", "shallow")
LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:[^\n]*\n)*?oid"
    rb" sha256:(?P<oid>[0-9a-f]{64})\n"
    rb"size (?P<size>[0-9]{1,18})\n"
)
LFS_POINTER_BYTES = 1024

GITLINK = "160000"  # mode that marks a submodule in the index
INDEX_ENTRY = re.compile(
    r"(?P<flag>\S) (?P<mode>[0-7]{6}) (?P<object_id>[0-9a-f]+) [0-3]\t(?P<name>.*)", re.DOTALL
)
NAMES_AT_ONCE = 100  # maximum number of file names that one git command gets as arguments


class GitError(RekindleError):
    """Git is not installed, or cannot read the repository."""


@dataclass(frozen=True)
class IndexEntry:
    """A tracked file. `flag`: the flag of `git ls-files`. S: git skips the file in the work tree; a
    lower-case letter: git assumes that the file is unchanged."""

    flag: str
    mode: str
    object_id: str
    name: str

    @property
    def is_skipped(self) -> bool:
        return self.flag.upper() == "S"

    @property
    def is_unchecked(self) -> bool:
        return self.is_skipped or self.flag.islower()


@dataclass(frozen=True)
class Repository:
    """A repository. git reads it through `private`, a git directory without the repository's own
    settings."""

    top: Path  # the work tree
    git_dir: Path
    common: Path  # equal to `git_dir`, except in a linked work tree
    private: Path

    def git(
        self, *arguments: str, index: Path | None = None, work_tree: Path | None = None
    ) -> bytes:
        """Return the output of a git command, which by default uses the index and the work tree.
        Raises GitError."""
        variables = {
            "GIT_OBJECT_DIRECTORY": str(self.common / "objects"),
            "GIT_INDEX_FILE": str(index or self.git_dir / "index"),
            "GIT_WORK_TREE": str(work_tree or self.top),
        }
        return _run_git(self.private, arguments, variables, work_tree or self.top)

    def find_commit(self, revision: str) -> str:
        """Return the sha of a commit; "" if it does not exist."""
        try:
            output = self.git(
                "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
            )
        except GitError:
            return ""
        return output.decode().strip()

    def commit(self) -> str:
        """Return the id of the current commit, with the suffix -dirty if tracked files were
        changed; "" before the first commit."""
        index_entries = self._index_entries()
        self._reject_special_attributes(index_entries)

        # checked before `git status` runs, because `git status` reads the references of submodules
        has_moved_submodule = self._has_moved_submodule(index_entries)

        # ignore submodules, because git would read their files with the submodule's own settings
        flags = [
            "--untracked-files=no",
            "--ignore-submodules=all",
            "--no-renames",
            "--no-ahead-behind",
        ]
        status = self.git("status", "--porcelain=2", "-z", "--branch", *flags)
        entries = status.decode(errors="surrogateescape").rstrip("\0").split("\0")

        commit = entries[0].removeprefix("# branch.oid ")
        if not commit.isalnum():
            return ""

        is_dirty = (
            any(self._is_change(entry) for entry in entries if not entry.startswith("#"))
            or self._has_staged_change()
            or has_moved_submodule
            or self._has_unchecked_change(index_entries)
        )
        if is_dirty:
            return f"{commit}-dirty"

        return commit

    def _index_entries(self) -> list[IndexEntry]:
        output = self.git("ls-files", "--stage", "-v", "-z")
        lines = output.decode(errors="surrogateescape").split("\0")
        matches = (INDEX_ENTRY.fullmatch(line) for line in lines)
        return [IndexEntry(**match.groupdict()) for match in matches if match]

    def _reject_special_attributes(self, entries: Iterable[IndexEntry]) -> None:
        """Raise GitError if a .gitattributes file is a FIFO or a device."""
        folders = {os.path.dirname(entry.name) for entry in entries}
        parents = {parent for folder in folders for parent in Path(folder, "file").parents}
        for folder in parents:
            path = self.top / folder / ".gitattributes"
            # a symbolic link is harmless, because git does not follow a .gitattributes link
            if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
                raise GitError(f"{path} is not a regular file: remove it.")

    def _has_staged_change(self) -> bool:
        """Return True if the index differs from the current commit, either in a file or in the
        commit of a submodule."""
        return bool(self.git("diff-index", "--cached", "--raw", "-z", "--no-renames", "HEAD"))

    def _has_moved_submodule(self, entries: Iterable[IndexEntry]) -> bool:
        """Return True if a submodule is at another commit than the index records. Raises GitError
        if the repository of a submodule contains a FIFO or a device."""
        has_moved = False
        for entry in entries:
            if entry.mode != GITLINK:
                continue

            folder = self.top / entry.name
            if (folder / ".git").exists():
                with open_repository(folder) as submodule:
                    commit = submodule.find_commit("HEAD") if submodule else ""
                if commit != entry.object_id:
                    has_moved = True

        return has_moved

    def _has_unchecked_change(self, entries: Iterable[IndexEntry]) -> bool:
        """Return True if a file was changed, but a flag in the index hides the change from `git
        status`."""
        unchecked = [entry for entry in entries if entry.is_unchecked and entry.mode != GITLINK]
        existing = [entry for entry in unchecked if os.path.lexists(self.top / entry.name)]
        has_missing_file = any(not entry.is_skipped for entry in unchecked if entry not in existing)
        has_other_file = any(
            not stat.S_ISREG((self.top / entry.name).lstat().st_mode) for entry in existing
        )
        if has_missing_file or has_other_file:
            return True

        for start in range(0, len(existing), NAMES_AT_ONCE):
            batch = existing[start : start + NAMES_AT_ONCE]
            object_ids = self.git("hash-object", "--", *(entry.name for entry in batch)).split()
            if [entry.object_id.encode() for entry in batch] != object_ids:
                return True

        return False

    def _is_change(self, entry: str) -> bool:
        """Return True if an entry of `git status` is a change. A Git LFS file with the committed
        content does not count as changed."""
        fields = entry.split(" ", 8)

        is_changed_file = (
            fields[:2] == ["1", ".M"]
            and fields[3] == fields[4] == fields[5]
            and fields[3][:3] == "100"
        )
        if not is_changed_file:
            return True

        object_id, name = fields[7:]
        try:
            size = int(self.git("cat-file", "-s", object_id))
            if size <= LFS_POINTER_BYTES:
                text = self.git("cat-file", "blob", object_id)
            else:
                text = b""
        except GitError:  # the object is missing if the clone is partial
            return True

        pointer = LFS_POINTER.fullmatch(text)
        return pointer is None or not _has_content(self.top / name, pointer)

    def check_out(self, commit: str, folder: Path) -> None:
        """Write the files of a commit to the empty `folder`. The index and the work tree of the
        repository are not changed."""
        index = folder.with_suffix(".index")
        self.git("read-tree", "--end-of-options", commit, index=index, work_tree=folder)
        self.git("checkout-index", "--all", "--force", index=index, work_tree=folder)
        self._restore_lfs_files(folder)

    def _restore_lfs_files(self, folder: Path) -> None:
        """Replace the pointer files of Git LFS by the contents that this clone has fetched, as the
        filter of Git LFS would."""
        objects = self.common / "lfs" / "objects"
        if not objects.is_dir():
            return

        for parent, _, names in os.walk(folder):
            for path in (Path(parent) / name for name in names):
                text = _read_if_regular(path, LFS_POINTER_BYTES)
                pointer = LFS_POINTER.fullmatch(text) if text else None
                if not pointer:
                    continue

                oid = pointer["oid"].decode()
                source = objects / oid[:2] / oid[2:4] / oid
                # skip links, because a link in the commit may lead to a file outside of the folder
                if not path.is_symlink() and _has_content(source, pointer):
                    path.write_bytes(source.read_bytes())


@contextmanager
def open_repository(folder: Path) -> Iterator[Repository | None]:
    """Yield the repository that contains `folder`, or None. Raises GitError if the repository
    cannot be read."""
    top = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if top is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rekindle-git-") as name:
        git_dir = _git_dir(top)
        common = _folder_named_in(git_dir / "commondir", "") or git_dir
        repository = Repository(top, git_dir, common, Path(name))
        _fill_private_folder(repository)
        yield repository


def _git_dir(top: Path) -> Path:
    """Return the git directory of a work tree; `.git` is a file instead of a folder in a linked
    work tree or a submodule."""
    path = top / ".git"
    git_dir = path if path.is_dir() else _folder_named_in(path, "gitdir:")
    if git_dir is None:
        raise GitError(
            f"{path} is neither a git directory, nor a file that names one: clone the repository"
            " again."
        )
    return git_dir


def _folder_named_in(file: Path, prefix: str) -> Path | None:
    """Return the folder that `file` names after `prefix`, by a path relative to the folder of
    `file`; None if this folder does not exist."""
    text = (_read_if_regular(file) or b"").decode(errors="surrogateescape").rstrip("\n")
    name = text.removeprefix(prefix).strip()
    if not name or "\0" in name or not text.startswith(prefix):
        return None
    target = (file.parent / name).resolve()
    if target.is_dir():
        return target
    return None


def _fill_private_folder(repository: Repository) -> None:
    """Fill the private git directory with links to data of the repository, a copy of HEAD, and
    harmless settings."""
    private = repository.private
    git_dir = repository.git_dir
    common = repository.common

    head = _read_if_regular(git_dir / "HEAD")
    if head is None:
        raise GitError(
            f"{git_dir} does not have a file HEAD, so it is not a git directory: clone the"
            " repository again."
        )

    alternates = common / "objects" / "info" / "alternates"
    if alternates.exists():
        raise GitError(
            f"{alternates} names objects outside of the repository, which are not read: run `git"
            " repack -a -d`, and remove this file."
        )

    _reject_special_files(common / "objects")
    for name in DATA_FOLDERS:
        _reject_special_files(common / name, MAX_TEXT_BYTES if name == "refs" else None)

    for path in (folder / name for folder in (git_dir, common) for name in READ_FILES):
        if path.exists() and not path.is_file():
            raise GitError(_refusal(path, "not a regular file"))

    (private / "HEAD").write_bytes(head)
    (private / "info").mkdir()
    for name in DATA_FOLDERS:
        if (common / name).is_dir():
            (private / name).symlink_to(common / name)

    for name in DATA_FILES:
        if (common / name).is_file():
            (private / name).symlink_to(common / name)

    for path in git_dir.glob("sharedindex.*"):  # files of a split index
        if path.is_file():
            (private / path.name).symlink_to(path)

    settings = _read_settings(repository)
    if "extensions.refstorage" in settings and git_dir != common:
        raise GitError(
            f"{git_dir} has another format of references than files: use the main work tree."
        )

    (private / "config").write_text(_format_config(settings))


def _reject_special_files(path: Path, limit: int | None = None) -> None:
    """Raise GitError unless a folder contains only folders, and regular files of at most `limit`
    bytes.

    Links are rejected, because they could lead to objects outside of the repository, as alternates
    do.
    """
    if path.is_symlink():
        raise GitError(_refusal(path, "a link to files outside of the repository"))
    if not path.is_dir():
        return

    with os.scandir(path) as listing:
        for entry in listing:
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False):
                _reject_special_files(Path(entry), limit)
            elif not entry.is_file(follow_symlinks=False):
                raise GitError(_refusal(entry.path, "not a regular file"))
            elif limit is not None and entry.stat().st_size > limit:
                raise GitError(_refusal(entry.path, f"a reference of more than {limit:,} bytes"))


def _refusal(path: Path | str, reason: str) -> str:
    return f"{path} is {reason}, which is not read: clone the repository again."


def _read_settings(repository: Repository) -> dict[str, str]:
    """Return those settings of the user's and the repository's configuration that are harmless."""
    (repository.private / "config").write_text(_format_config({}))

    list_settings = ["config", "-z", "--list"]
    texts = [_run_git(repository.private, list_settings, with_user_settings=True)]

    for file in (repository.common / "config", repository.git_dir / "config.worktree"):
        if _read_if_regular(file) is not None:
            texts.append(
                _run_git(
                    repository.private,
                    ["config", "-z", "--no-includes", "--list", "--file", str(file)],
                )
            )

    settings: dict[str, str] = {}
    for entry in b"".join(texts).decode(errors="surrogateescape").split("\0"):
        name, separator, value = entry.partition("\n")
        if name in HARMLESS_SETTINGS and SETTING_VALUE.fullmatch(value):
            settings[name] = value if separator else "true"

    return settings


def _format_config(settings: Mapping[str, str]) -> str:
    lines = [
        "[core]",
        "repositoryformatversion = 1",
        "bare = false",
        "fsmonitor = false",
        "attributesfile = /dev/null",
    ]
    for name, value in settings.items():
        section, _, key = name.partition(".")
        lines += [f"[{section}]", f"{key} = {value}"]
    return "\n".join(lines) + "\n"


def _run_git(
    private: Path,
    arguments: list[str] | tuple[str, ...],
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    with_user_settings: bool = False,
) -> bytes:
    """Run git on the private git directory, without network access; return its output. Raises
    GitError."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_DIR": str(private),
        "GIT_ALLOW_PROTOCOL": "",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        **(variables or {}),
    }

    if not with_user_settings:
        environment["GIT_CONFIG_NOSYSTEM"] = "1"
        environment["GIT_CONFIG_GLOBAL"] = os.devnull

    is_checkout = arguments[0] in ("read-tree", "checkout-index")
    timeout = CHECKOUT_TIMEOUT_S if is_checkout else TIMEOUT_S

    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=folder or private,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            preexec_fn=_limit_memory,
        )
    except FileNotFoundError:
        raise GitError("git is not installed: install it.") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} did not end within {timeout} seconds.") from None
    except OSError as error:
        raise GitError(f"git {arguments[0]} failed: {error}") from None

    if process.returncode:
        reason = process.stderr.decode(errors="replace").strip()
        raise GitError(f"git {arguments[0]} says: {shorten(reason[:500])}")

    return process.stdout


def _limit_memory() -> None:
    """Limit the memory of this process."""
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MAX_MEMORY_BYTES
    if highest != resource.RLIM_INFINITY:
        limit = min(limit, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, highest))


def _read_if_regular(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes | None:
    """Return the content of a file; None if it does not exist, is not a regular file or is too
    large."""
    try:
        return read_regular(path, limit)
    except OSError:
        return None


def _has_content(path: Path, pointer: "re.Match[bytes]") -> bool:
    """Return True if a file has the content that a pointer of Git LFS names."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != int(pointer["size"]):
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == pointer["oid"].decode()
    except OSError:
        return False
