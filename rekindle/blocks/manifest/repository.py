"""Read the git repository of a project without trusting the repository: git must not start a
program that the repository names.

The configuration, attributes and hooks of a repository can name programs, and no option of git
disables all of them. Therefore, git reads the objects, references and index of the repository
through a private git directory, which has no hooks, no remotes and only harmless settings. Objects
of other repositories (alternates) are not read. A repository that contains a FIFO or a device is
rejected, because git would block on such a file, or read the file endlessly. No other module runs
git.
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

from argolocal.common.files import read_regular_file
from argolocal.common.wording import shorten
from rekindle.errors import RekindleError

TIMEOUT_S = 10
CHECKOUT_TIMEOUT_S = 600
# maximum size of a file, such as HEAD, that git or this module parses
MAX_TEXT_BYTES = 1 << 20
# memory limit of git, because a small compressed object may unpack to any size
MAX_MEMORY_BYTES = 2 << 30

# settings of git for the comparison and checkout of files, whose values cannot name a program or a
# file
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

# folders and files of a git directory that contain only data
DATA_FOLDERS = ("refs", "reftable", "logs")
DATA_FILES = ("packed-refs", "shallow", "info/attributes")
# files of a submodule's repository that git reads
FILES_TO_READ = (
    "HEAD",
    "commondir",
    "config",
    "config.worktree",
    "index",
    "packed-refs",
    "shallow",
)
LFS_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:[^\n]*\n)*?oid"
    rb" sha256:(?P<oid>[0-9a-f]{64})\n"
    rb"size (?P<size>[0-9]{1,18})\n"
)
LFS_POINTER_BYTES = 1024

# mode that marks a submodule in the index
GITLINK = "160000"
INDEX_ENTRY = re.compile(
    r"(?P<flag>\S) (?P<mode>[0-7]{6}) (?P<object_id>[0-9a-f]+) [0-3]\t(?P<name>.*)", re.DOTALL
)
# maximum number of file names that one git command gets as arguments
MAX_NAMES_PER_COMMAND = 100


class GitError(RekindleError):
    """Git is not installed, or cannot read the repository."""


@dataclass(frozen=True)
class IndexEntry:
    """A tracked file in the index of a git repository. `flag`: the flag that `git ls-files -v`
    shows, for example S (git does not compare the file in the work tree) or a lower-case letter
    (git assumes that the file is unchanged)."""

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
    """A git repository, which git reads through `private_dir`, a git directory without the
    repository's own settings."""

    work_tree: Path
    git_dir: Path
    # equal to `git_dir`, except in a linked work tree
    common_dir: Path
    private_dir: Path

    def git(
        self, *git_arguments: str, index: Path | None = None, work_tree: Path | None = None
    ) -> bytes:
        """Return the output of a git command, which by default uses the index and the work tree.
        Raises GitError."""
        git_variables = {
            "GIT_OBJECT_DIRECTORY": str(self.common_dir / "objects"),
            "GIT_INDEX_FILE": str(index or self.git_dir / "index"),
            "GIT_WORK_TREE": str(work_tree or self.work_tree),
        }
        return _run_git(self.private_dir, git_arguments, git_variables, work_tree or self.work_tree)

    def find_commit(self, revision: str) -> str:
        """Return the sha of the commit that `revision` names; "" if the commit does not exist."""
        try:
            git_output = self.git(
                "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
            )
        except GitError:
            return ""
        return git_output.decode().strip()

    def read_commit(self) -> str:
        """Return the id of the current commit, with the suffix -dirty if tracked files were
        changed; "" before the first commit."""
        index_entries = self._list_index_entries()
        self._reject_special_attributes(index_entries)

        # check the submodules before `git status` reads the references of submodules
        has_moved_submodule = self._has_moved_submodule(index_entries)

        # ignore submodules, because git would read their files with the submodule's own settings
        status_flags = [
            "--untracked-files=no",
            "--ignore-submodules=all",
            "--no-renames",
            "--no-ahead-behind",
        ]
        status_output = self.git("status", "--porcelain=2", "-z", "--branch", *status_flags)
        status_entries = status_output.decode(errors="surrogateescape").rstrip("\0").split("\0")

        commit_sha = status_entries[0].removeprefix("# branch.oid ")
        if not commit_sha.isalnum():
            return ""

        is_dirty = (
            any(
                self._is_change(status_entry)
                for status_entry in status_entries
                if not status_entry.startswith("#")
            )
            or self._has_staged_change()
            or has_moved_submodule
            or self._has_unchecked_change(index_entries)
        )
        if is_dirty:
            return f"{commit_sha}-dirty"

        return commit_sha

    def _list_index_entries(self) -> list[IndexEntry]:
        git_output = self.git("ls-files", "--stage", "-v", "-z")
        entry_lines = git_output.decode(errors="surrogateescape").split("\0")
        entry_matches = (INDEX_ENTRY.fullmatch(line) for line in entry_lines)
        return [
            IndexEntry(**entry_match.groupdict()) for entry_match in entry_matches if entry_match
        ]

    def _reject_special_attributes(self, index_entries: Iterable[IndexEntry]) -> None:
        """Raise GitError if a .gitattributes file is a FIFO or a device."""
        entry_folders = {os.path.dirname(index_entry.name) for index_entry in index_entries}
        parent_folders = {
            parent_folder
            for folder in entry_folders
            for parent_folder in Path(folder, "file").parents
        }
        for folder in parent_folders:
            path = self.work_tree / folder / ".gitattributes"
            # a symbolic link is harmless, because git does not follow a .gitattributes link
            if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
                raise GitError(f"{path} is not a regular file: remove it.")

    def _has_staged_change(self) -> bool:
        """Return True if the index differs from the current commit, either in a file or in the
        commit of a submodule."""
        return bool(self.git("diff-index", "--cached", "--raw", "-z", "--no-renames", "HEAD"))

    def _has_moved_submodule(self, index_entries: Iterable[IndexEntry]) -> bool:
        """Return True if a submodule is at another commit than the index records. Raises GitError
        if the repository of a submodule contains a FIFO or a device."""
        has_moved = False
        for index_entry in index_entries:
            if index_entry.mode != GITLINK:
                continue

            submodule_folder = self.work_tree / index_entry.name
            if (submodule_folder / ".git").exists():
                with open_repository(submodule_folder) as submodule:
                    submodule_commit = submodule.find_commit("HEAD") if submodule else ""
                if submodule_commit != index_entry.object_id:
                    has_moved = True

        return has_moved

    def _has_unchecked_change(self, index_entries: Iterable[IndexEntry]) -> bool:
        """Return True if a file was changed although a flag in the index hides the change from
        `git status`."""
        unchecked_entries = [
            index_entry
            for index_entry in index_entries
            if index_entry.is_unchecked and index_entry.mode != GITLINK
        ]
        existing_entries = [
            index_entry
            for index_entry in unchecked_entries
            if os.path.lexists(self.work_tree / index_entry.name)
        ]
        has_missing_file = any(
            not index_entry.is_skipped
            for index_entry in unchecked_entries
            if index_entry not in existing_entries
        )
        has_other_file = any(
            not stat.S_ISREG((self.work_tree / index_entry.name).lstat().st_mode)
            for index_entry in existing_entries
        )
        if has_missing_file or has_other_file:
            return True

        for batch_start in range(0, len(existing_entries), MAX_NAMES_PER_COMMAND):
            batch_entries = existing_entries[batch_start : batch_start + MAX_NAMES_PER_COMMAND]
            object_ids = self.git(
                "hash-object", "--", *(index_entry.name for index_entry in batch_entries)
            ).split()
            if [index_entry.object_id.encode() for index_entry in batch_entries] != object_ids:
                return True

        return False

    def _is_change(self, status_entry: str) -> bool:
        """Return True if an entry of `git status` is a change of a tracked file. A Git LFS file
        with the committed content does not count as changed."""
        entry_fields = status_entry.split(" ", 8)

        is_changed_file = (
            entry_fields[:2] == ["1", ".M"]
            and entry_fields[3] == entry_fields[4] == entry_fields[5]
            and entry_fields[3][:3] == "100"
        )
        if not is_changed_file:
            return True

        object_id, file_name = entry_fields[7:]
        try:
            blob_size_bytes = int(self.git("cat-file", "-s", object_id))
            if blob_size_bytes <= LFS_POINTER_BYTES:
                file_text = self.git("cat-file", "blob", object_id)
            else:
                file_text = b""
        except GitError:
            # the object is missing if the clone is partial, so the file counts as changed
            return True

        pointer_match = LFS_POINTER.fullmatch(file_text)
        return pointer_match is None or not _has_content(self.work_tree / file_name, pointer_match)

    def check_out_commit(self, commit_sha: str, folder: Path) -> None:
        """Write the files of a commit to the empty `folder`. The index and the work tree of the
        repository are not changed."""
        index = folder.with_suffix(".index")
        self.git("read-tree", "--end-of-options", commit_sha, index=index, work_tree=folder)
        self.git("checkout-index", "--all", "--force", index=index, work_tree=folder)
        self._restore_lfs_files(folder)

    def _restore_lfs_files(self, folder: Path) -> None:
        """Replace each pointer file of Git LFS by its content if this clone has fetched it. Git LFS
        would replace pointer files by running a program, its filter."""
        lfs_objects = self.common_dir / "lfs" / "objects"
        if not lfs_objects.is_dir():
            return

        for parent_folder, _, file_names in os.walk(folder):
            for path in (Path(parent_folder) / name for name in file_names):
                text = _read_if_regular(path, LFS_POINTER_BYTES)
                pointer_match = LFS_POINTER.fullmatch(text) if text else None
                if not pointer_match:
                    continue

                object_id = pointer_match["oid"].decode()
                object_file = lfs_objects / object_id[:2] / object_id[2:4] / object_id
                # skip links, because a link in the commit may point to a file outside of the folder
                if not path.is_symlink() and _has_content(object_file, pointer_match):
                    path.write_bytes(object_file.read_bytes())


@contextmanager
def open_repository(folder: Path) -> Iterator[Repository | None]:
    """Yield the repository that contains `folder`; None if `folder` is not in a repository. Raises
    GitError if the repository cannot be read."""
    work_tree = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if work_tree is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rekindle-git-") as name:
        git_dir = _find_git_dir(work_tree)
        common_dir = _read_named_folder(git_dir / "commondir", "") or git_dir
        repository = Repository(work_tree, git_dir, common_dir, Path(name))
        _fill_private_git_dir(repository)
        yield repository


def _find_git_dir(work_tree: Path) -> Path:
    """Return the git directory of a work tree; `.git` is a file instead of a folder in a linked
    work tree or a submodule."""
    path = work_tree / ".git"
    git_dir = path if path.is_dir() else _read_named_folder(path, "gitdir:")
    if git_dir is None:
        raise GitError(
            f"{path} is neither a git directory, nor a file that names one: clone the repository"
            " again."
        )
    return git_dir


def _read_named_folder(file: Path, line_prefix: str) -> Path | None:
    """Return the folder that a file such as `.git` names after `line_prefix`, by a path relative to
    the folder of `file`; None if the named folder does not exist."""
    text = (_read_if_regular(file) or b"").decode(errors="surrogateescape").rstrip("\n")
    name = text.removeprefix(line_prefix).strip()
    if not name or "\0" in name or not text.startswith(line_prefix):
        return None
    target_folder = (file.parent / name).resolve()
    if target_folder.is_dir():
        return target_folder
    return None


def _fill_private_git_dir(repository: Repository) -> None:
    """Fill the private git directory with links to the repository's data, a copy of HEAD, and
    harmless settings. Raises GitError if a file of the repository is not safe to read."""
    private_dir = repository.private_dir
    git_dir = repository.git_dir
    common_dir = repository.common_dir

    head_content = _read_if_regular(git_dir / "HEAD")
    if head_content is None:
        raise GitError(
            f"{git_dir} does not have a file HEAD, so it is not a git directory: clone the"
            " repository again."
        )

    alternates_file = common_dir / "objects" / "info" / "alternates"
    if alternates_file.exists():
        raise GitError(
            f"{alternates_file} names objects outside of the repository, which Rekindle does not"
            " read: run"
            " `git repack -a -d`, and remove this file."
        )

    _reject_special_files(common_dir / "objects")
    for name in DATA_FOLDERS:
        _reject_special_files(common_dir / name, MAX_TEXT_BYTES if name == "refs" else None)

    for path in (folder / name for folder in (git_dir, common_dir) for name in FILES_TO_READ):
        if path.exists() and not path.is_file():
            raise GitError(_describe_refusal(path, "not a regular file"))

    (private_dir / "HEAD").write_bytes(head_content)
    (private_dir / "info").mkdir()
    for name in DATA_FOLDERS:
        if (common_dir / name).is_dir():
            (private_dir / name).symlink_to(common_dir / name)

    for name in DATA_FILES:
        if (common_dir / name).is_file():
            (private_dir / name).symlink_to(common_dir / name)

    # the files `sharedindex.*` belong to a split index
    for path in git_dir.glob("sharedindex.*"):
        if path.is_file():
            (private_dir / path.name).symlink_to(path)

    git_settings = _read_settings(repository)
    if "extensions.refstorage" in git_settings and git_dir != common_dir:
        raise GitError(f"{git_dir} does not store its references as files: use the main work tree.")

    (private_dir / "config").write_text(_format_config(git_settings))


def _reject_special_files(path: Path, max_bytes: int | None = None) -> None:
    """Raise GitError unless a folder contains only folders, and regular files of at most
    `max_bytes` bytes (None: any size).

    Links are rejected, because a link could point to objects outside of the repository, as
    alternates do.
    """
    if path.is_symlink():
        raise GitError(_describe_refusal(path, "a link to files outside of the repository"))
    if not path.is_dir():
        return

    with os.scandir(path) as folder_entries:
        for folder_entry in folder_entries:
            if folder_entry.is_symlink() or folder_entry.is_dir(follow_symlinks=False):
                _reject_special_files(Path(folder_entry), max_bytes)
            elif not folder_entry.is_file(follow_symlinks=False):
                raise GitError(_describe_refusal(folder_entry.path, "not a regular file"))
            elif max_bytes is not None and folder_entry.stat().st_size > max_bytes:
                raise GitError(
                    _describe_refusal(
                        folder_entry.path, f"a reference of more than {max_bytes:,} bytes"
                    )
                )


def _describe_refusal(path: Path | str, refusal_reason: str) -> str:
    return f"{path} is {refusal_reason}, which Rekindle does not read: clone the repository again."


def _read_settings(repository: Repository) -> dict[str, str]:
    """Return the harmless settings from the configurations of the user and of the repository."""
    (repository.private_dir / "config").write_text(_format_config({}))

    list_command = ["config", "-z", "--list"]
    setting_texts = [_run_git(repository.private_dir, list_command, with_user_settings=True)]

    for file in (repository.common_dir / "config", repository.git_dir / "config.worktree"):
        if _read_if_regular(file) is not None:
            setting_texts.append(
                _run_git(
                    repository.private_dir,
                    ["config", "-z", "--no-includes", "--list", "--file", str(file)],
                )
            )

    harmless_settings: dict[str, str] = {}
    for setting_entry in b"".join(setting_texts).decode(errors="surrogateescape").split("\0"):
        setting_name, separator, setting_value = setting_entry.partition("\n")
        if setting_name in HARMLESS_SETTINGS and SETTING_VALUE.fullmatch(setting_value):
            harmless_settings[setting_name] = setting_value if separator else "true"

    return harmless_settings


def _format_config(git_settings: Mapping[str, str]) -> str:
    config_lines = [
        "[core]",
        "repositoryformatversion = 1",
        "bare = false",
        "fsmonitor = false",
        "attributesfile = /dev/null",
    ]
    for setting_name, setting_value in git_settings.items():
        section_name, _, key = setting_name.partition(".")
        config_lines += [f"[{section_name}]", f"{key} = {setting_value}"]
    return "\n".join(config_lines) + "\n"


def _run_git(
    private_dir: Path,
    git_arguments: list[str] | tuple[str, ...],
    git_variables: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
    with_user_settings: bool = False,
) -> bytes:
    """Run git on the private git directory, without network access; return its output. Raises
    GitError."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_DIR": str(private_dir),
        "GIT_ALLOW_PROTOCOL": "",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        **(git_variables or {}),
    }

    if not with_user_settings:
        environment["GIT_CONFIG_NOSYSTEM"] = "1"
        environment["GIT_CONFIG_GLOBAL"] = os.devnull

    is_checkout = git_arguments[0] in ("read-tree", "checkout-index")
    timeout_s = CHECKOUT_TIMEOUT_S if is_checkout else TIMEOUT_S

    try:
        git_process = subprocess.run(
            ["git", *git_arguments],
            cwd=working_folder or private_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            preexec_fn=_limit_memory,
        )
    except FileNotFoundError:
        raise GitError("git is not installed: install it.") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {git_arguments[0]} did not end within {timeout_s} seconds.") from None
    except OSError as error:
        raise GitError(f"git {git_arguments[0]} failed: {error}") from None

    if git_process.returncode:
        error_output = git_process.stderr.decode(errors="replace").strip()
        raise GitError(f"git {git_arguments[0]} says: {shorten(error_output[:500])}")

    return git_process.stdout


def _limit_memory() -> None:
    """Limit the memory of this process to MAX_MEMORY_BYTES, or to its hard limit if this limit is
    lower."""
    _, hard_limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = MAX_MEMORY_BYTES
    if hard_limit_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard_limit_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard_limit_bytes))


def _read_if_regular(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes | None:
    """Return the content of a file; None if the file does not exist, is not a regular file or is
    too large."""
    try:
        return read_regular_file(path, max_bytes)
    except OSError:
        return None


def _has_content(path: Path, pointer_match: "re.Match[bytes]") -> bool:
    """Return True if a file has the size and the sha256 that a pointer file of Git LFS states."""
    try:
        file_status = path.lstat()
        if not stat.S_ISREG(file_status.st_mode) or file_status.st_size != int(
            pointer_match["size"]
        ):
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == pointer_match["oid"].decode()
    except OSError:
        return False
