"""Give a pod its own file system tree without a container: the machine's `/` with private
directories.

A pod sees all files of the machine, but it has its own /tmp, and its own directories for the files
that the manifest declares. For example, the path /tmp/out.txt is a different file in each pod: on
the machine, it is the file tmp/out.txt below the pod's root directory. In a system directory such
as /usr, only the declared path itself is private.

As in a container, writes and deletions outside of the private directories never reach the machine:
they go to an overlay (overlayfs, in memory) that is deleted with the pod. If an overlay of a
directory is impossible (on some kernels, and on file systems mounted below the overlay), the pod
has read-only access. If the user is root and the kernel allows it, one overlay covers all files of
the machine, and the runner reads outputs behind links from this overlay. Without root or this
support of the kernel, each top-level directory has its own overlay. The pod shares /dev/shm with
the machine, unless a volume is mounted there.
"""

import contextlib
import ctypes
import errno
import os
import re
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
# mount flags that a remount must keep: nosuid, nodev and noexec
LOCKED_FLAGS = 2 | 4 | 8
MNT_DETACH = 2
# the kernel follows at most 40 links
MAX_SYMLINKS = 40
# the system call mount_setattr of Linux 5.12
SYS_MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000
AT_FDCWD = -100
KERNEL_DIRECTORIES = {"dev", "proc", "sys"}
SYSTEM_DIRECTORIES = KERNEL_DIRECTORIES | {
    *("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "run", "var", "boot"),
}
PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
SHARED_MEMORY_PATH = "/dev/shm"
# an escaped character in /proc/self/mountinfo, for example a space
OCTAL_ESCAPE = re.compile(rb"\\([0-7]{3})")
LIBC = ctypes.CDLL(None, use_errno=True)
# (source, mount path, read only)
BindMount = tuple[Path, str, bool]


def find_unsupported_path(paths: Iterable[str]) -> str | None:
    """Return the first path that cannot be private: a system directory, or a path below /dev, /proc
    or /sys. Return None if all paths can be private."""
    for path in paths:
        top_level = _find_top_level(Path(path))
        if Path(path) != Path(SHARED_MEMORY_PATH) and (
            top_level in KERNEL_DIRECTORIES
            or (top_level in SYSTEM_DIRECTORIES and os.path.isdir(path))
        ):
            return path
    return None


def path_in_root(root: Path, path: str) -> Path:
    """Return the path on this machine of the file that a pod with the root directory `root` sees at
    `path`."""
    path_parts = Path(os.path.normpath(path)).parts[1:]
    # a system directory may be a link to another one, for example, /bin is often a link to /usr/bin
    if path_parts[:1] and path_parts[0] in SYSTEM_DIRECTORIES:
        path = str(Path(os.path.realpath(Path("/", *path_parts[:-1]))) / path_parts[-1])
    return root / os.path.normpath(path).lstrip("/")


def resolve_links(path: str, host_path: Callable[[Path], Path]) -> Path:
    """Resolve all links of `path` in a pod. `host_path` maps a path of the pod without links to a
    file on this machine. Raises OSError for a loop of links."""
    resolved_path = Path("/")
    # the names in the path that are not resolved yet, in reverse order
    remaining_names = [*reversed(Path(os.path.normpath(path)).parts[1:])]
    link_count = 0

    while remaining_names:
        name = remaining_names.pop()
        if name == "..":
            resolved_path = resolved_path.parent
            continue

        host_file = host_path(resolved_path / name)
        if not host_file.is_symlink():
            resolved_path = resolved_path / name
            continue

        link_count += 1
        if link_count > MAX_SYMLINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

        link_target = Path(os.readlink(host_file))
        if link_target.is_absolute():
            resolved_path = Path("/")

        remaining_names += reversed([name for name in link_target.parts if name != "/"])

    return resolved_path


def _find_top_level(path: Path) -> str:
    """Return the name of the top-level directory of an absolute path, or "" for `/` itself."""
    return next(iter(path.parts[1:2]), "")


def succeeds_in_child(action: Callable[[], None]) -> bool:
    """Run `action` in a child process. Return True if `action` does not raise an exception."""
    child_pid = os.fork()
    if child_pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child_pid, 0)[1] == 0


@cache
def supports_namespaces() -> bool:
    """Return True if this system allows mount namespaces. The result of the check is cached."""
    return succeeds_in_child(lambda: _enter_namespace(os.getuid(), os.getgid()))


@cache
def _supports_root_overlay() -> bool:
    """Return True if one overlay can cover all files of the machine. The result of the check is
    cached."""

    def mount_test_overlay() -> None:
        _enter_namespace(os.getuid(), os.getgid())
        _raise_on_error(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None), "mount")
        view_path = Path("/tmp/view")
        view_path.mkdir()
        _raise_on_error(not _mount_overlay(Path("/"), view_path, Path("/tmp/machine")), "mount")

    return succeeds_in_child(mount_test_overlay)


@dataclass(frozen=True)
class _MountPlan:
    """The mounts that make the file system tree of one container.

    `view`: directory that becomes the root of the container. `scratch`: directory for the changes
    in the overlays; a tmpfs is mounted in this directory. `separate_mounts`: directories of the
    machine that are mounted one by one. `private_names`: private top-level directories to mount
    over the overlay of the machine. `nested_mounts`: mount points of the machine that overlays do
    not contain, by the path of the directory that contains the mount points. `binds`: (source,
    target, read only), sorted by the depth of the target; if the third value is None, the source
    gets an overlay.
    """

    root: Path
    view: Path
    scratch: Path
    covers_machine: bool
    separate_mounts: list[Path]
    private_names: list[str]
    nested_mounts: dict[Path, list[Path]]
    binds: list[tuple[Path, Path, bool | None]]
    child_socket: socket.socket

    def enter(self) -> None:
        """Mount all directories of the tree, and move this process into the tree. In a tree with
        one overlay, also send a descriptor of the tree to the parent process."""
        _enter_namespace(os.getuid(), os.getgid())
        _raise_on_error(LIBC.mount(b"none", os.fsencode(self.scratch), b"tmpfs", 0, None), "mount")
        if self.covers_machine:
            self.view.mkdir()
            _raise_on_error(
                not _mount_overlay(Path("/"), self.view, self.scratch / "machine"), "mount"
            )

        for index, source_path in enumerate(self.separate_mounts):
            target_path = self.view / source_path.relative_to("/")
            _mount_layer(source_path, target_path, self.scratch / str(index))

        for name in self.private_names:
            self._mount_private_directory(name)

        self._mount_nested(Path("/"))
        for index, (source_path, target_path, is_read_only) in enumerate(self.binds):
            if is_read_only is None:
                _mount_layer(source_path, target_path, self.scratch / f"kept{index}")
                self._mount_nested(source_path)
            else:
                _bind_mount(source_path, target_path, is_read_only)

        if self.covers_machine:
            socket.send_fds(self.child_socket, [b"/"], [os.open(self.view, os.O_PATH)])
        else:
            # the overlays still use the tmpfs after this unmount
            _raise_on_error(LIBC.umount2(os.fsencode(self.scratch), MNT_DETACH), "umount")

        os.chroot(self.view)
        os.chdir("/")

    def _mount_private_directory(self, name: str) -> None:
        target_path = self.view / name
        if target_path.is_symlink() or not target_path.is_dir():
            target_path.unlink(missing_ok=True)
            target_path.mkdir()

        _bind_mount(self.root / name, target_path, is_read_only=False)

    def _mount_nested(self, outer_path: Path) -> None:
        for mount_point in self.nested_mounts[outer_path]:
            # another process may remove a mount at any time
            with contextlib.suppress(OSError):
                target_path = self.view / mount_point.relative_to("/")
                _bind_mount(mount_point, target_path, is_read_only=True)


class FileSystemView:
    """The file system tree of one container: the declared `paths` below `root`, and all other files
    of the machine.

    `binds`: the mounted files and directories, outer mounts first. `fd`: descriptor of the tree if
    one overlay covers the machine and the container has started, otherwise None.
    """

    def __init__(
        self, root: Path, paths: Iterable[str], bind_mounts: Iterable[BindMount] = ()
    ) -> None:
        self.root = root
        self.binds = [
            (source_path, os.path.normpath(path), is_read_only)
            for source_path, path, is_read_only in bind_mounts
        ]
        self.binds.sort(key=lambda bind_mount: bind_mount[1].count("/"))
        all_paths = [
            *paths,
            *(mount_path for _, mount_path, _ in self.binds if mount_path != SHARED_MEMORY_PATH),
        ]
        self.declared_paths = [
            Path("/", path_in_root(root, path).relative_to(root)) for path in all_paths
        ]
        self.private_top_levels = {"tmp"} | {
            _find_top_level(path) for path in self.declared_paths
        } - SYSTEM_DIRECTORIES
        self.sockets: tuple[socket.socket, ...] = ()
        self.fd: int | None = None

    def host_path(self, path: Path, must_exist: bool = False) -> Path:
        """Return the path on this machine of the file that the pod sees at `path`. Only the last
        part of `path` may be a link.

        With `must_exist`, raises OSError if the file at `path` is a file of the machine itself,
        because the pod cannot have written such a file.
        """
        for source_path, mount_path, _ in reversed(self.binds):
            if path.is_relative_to(mount_path):
                return source_path / path.relative_to(mount_path)

        if _find_top_level(path) in self.private_top_levels or any(
            path.is_relative_to(declared_path)
            for declared_path in self.declared_paths
            if declared_path.parts[1:]
        ):
            return path_in_root(self.root, str(path))

        if self.fd is not None:
            return Path(f"/proc/self/fd/{self.fd}") / path.relative_to("/")
        if not os.path.lexists(Path("/", *path.parts[1:2])):
            return path_in_root(self.root, str(path))

        if must_exist:
            raise OSError(
                errno.ENOENT,
                "a link leads out of the directories that the template names",
                str(path),
            )

        return path

    def prepare(self, paths_to_keep: Iterable[Path]) -> Callable[[], None]:
        """Prepare the directories of the file system tree. Return a function that the new process
        must call to enter the tree. The returned function only makes system calls.

        `paths_to_keep`: paths of the machine that the pod must see even if a private directory
        hides them. Raises OSError.
        """
        root = self.root
        kept_paths = self._make_mount_points(paths_to_keep)
        # the call of `_has_own_top_levels` below requires the mount points
        covers_machine = _supports_root_overlay() and self._has_own_top_levels()
        scratch_directory = root / ".layers"
        machine_mount_points = _read_mount_points()
        scratch_directory.mkdir(exist_ok=True)

        top_levels = [
            Path(directory_entry.path)
            for directory_entry in os.scandir("/")
            if directory_entry.name not in self.private_top_levels
        ]

        if covers_machine:
            view_path = scratch_directory / "view"
            separate_mounts = [
                top_level
                for top_level in top_levels
                if top_level.name in KERNEL_DIRECTORIES
                or os.fsencode(top_level) in machine_mount_points
            ]
            private_names = [name for name in os.listdir(root) if name in self.private_top_levels]
        else:
            # `root` itself becomes the view, since it contains the private files; the machine's
            # directories are mounted into `root`
            view_path = root
            separate_mounts = [*_make_root_mount_points(top_levels, root, self.declared_paths)]
            private_names = []

        overlaid_paths = [path for path in top_levels if path.name not in KERNEL_DIRECTORIES]
        nested_mounts = {Path("/"): _list_mounts_below(machine_mount_points, overlaid_paths)}
        for path in kept_paths:
            nested_mounts[path] = _list_mounts_below(machine_mount_points, [path])

        all_binds = [*((path, str(path), None) for path in kept_paths), *self.binds]
        view_binds = [
            (source_path, path_in_root(view_path, path), is_read_only)
            for source_path, path, is_read_only in all_binds
        ]
        view_binds.sort(key=lambda bind_mount: len(bind_mount[1].parts))
        self.sockets = parent_socket, child_socket = socket.socketpair()
        parent_socket.setblocking(False)

        plan = _MountPlan(
            root=root,
            view=view_path,
            scratch=scratch_directory,
            covers_machine=covers_machine,
            separate_mounts=separate_mounts,
            private_names=private_names,
            nested_mounts=nested_mounts,
            binds=view_binds,
            child_socket=child_socket,
        )
        return plan.enter

    def child_started(self) -> None:
        """Receive the descriptor of the overlay from the child process, so that the overlay stays
        readable while this object exists. Call this method after each attempt to start a process,
        even if the attempt failed."""
        parent_socket, child_socket = self.sockets
        with contextlib.suppress(BlockingIOError):
            _, received_descriptors, _, _ = socket.recv_fds(
                parent_socket, 1, 1, socket.MSG_CMSG_CLOEXEC
            )
            self.fd = received_descriptors[0]
            weakref.finalize(self, os.close, self.fd)
        parent_socket.close()
        child_socket.close()

    def _has_own_top_levels(self) -> bool:
        """Return True if no declared path needs a top-level directory that the pod shares with the
        machine, because each declared path is below a private top-level directory."""
        top_levels = [(_find_top_level(path), path) for path in self.declared_paths]
        return all(
            top_level not in SYSTEM_DIRECTORIES
            and (len(path.parts) > 2 or (self.root / top_level).is_dir())
            for top_level, path in top_levels
        )

    def _make_mount_points(self, paths_to_keep: Iterable[Path]) -> list[Path]:
        """Create the private directories and the mount points in them. Return the paths of the
        machine that private directories hide although the pod needs them. The caller must mount the
        returned paths."""
        home_directory = Path(os.environ.get("HOME", "/"))
        # top-level directories of the declared paths, except of files directly below /
        top_levels = {
            Path("/", _find_top_level(path)) for path in self.declared_paths if len(path.parts) > 2
        }

        for name in self.private_top_levels:
            # an earlier attempt of this pod has left the link
            if (self.root / name).is_symlink():
                (self.root / name).unlink()

        for path in {
            Path("/tmp"),
            *top_levels,
            *([home_directory] if home_directory.is_absolute() else []),
        }:
            if _find_top_level(path) in self.private_top_levels:
                (self.root / path.relative_to("/")).mkdir(parents=True, exist_ok=True)

        (self.root / "tmp").chmod(0o1777)
        package_folders = (Path(folder) for folder in sys.path if folder.endswith("-packages"))

        visible_paths = {
            *paths_to_keep,
            Path(sys.prefix),
            Path(sys.base_prefix),
            PACKAGES_FOLDER,
            *package_folders,
        }

        paths_to_mount = [
            path for path in visible_paths if _find_top_level(path) in self.private_top_levels
        ]
        for source_path, path in [
            *(bind_mount[:2] for bind_mount in self.binds),
            *((path, str(path)) for path in paths_to_mount),
        ]:
            if path == SHARED_MEMORY_PATH:
                continue

            _make_mount_point(source_path, path_in_root(self.root, path))
            # if `path` is inside another volume, its mount point must exist in that volume, too
            for outer_source, mount_path, _ in self.binds:
                if path != mount_path and Path(path).is_relative_to(mount_path):
                    inner_path = Path("/", Path(path).relative_to(mount_path))
                    final_path = resolve_links(
                        str(inner_path),
                        lambda nested_path: outer_source / nested_path.relative_to("/"),  # noqa: B023
                    )
                    if final_path != inner_path:
                        raise OSError(
                            errno.ELOOP, "a link leads from the mount path out of the volume", path
                        )

                    _make_mount_point(
                        source_path, outer_source / Path(path).relative_to(mount_path)
                    )

        return paths_to_mount


def enter_process_root(pid: int) -> Callable[[], None]:
    """Return a function that moves a new process into the file system tree of process `pid`. Raises
    OSError."""
    root_descriptor = os.open(f"/proc/{pid}/root", os.O_PATH)
    uid = os.getuid()
    gid = os.getgid()

    def enter() -> None:
        if uid:
            _enter_namespace(uid, gid)
        os.fchdir(root_descriptor)
        os.chroot(".")

    weakref.finalize(enter, os.close, root_descriptor)
    return enter


def _read_mount_points() -> set[bytes]:
    """Return the paths of all mount points of this process."""
    with open("/proc/self/mountinfo", "rb") as mount_table:
        escaped_paths = [line.split(b" ")[4] for line in mount_table]
    decode_escape = lambda match: bytes([int(match[1], 8)])  # noqa: E731
    return {OCTAL_ESCAPE.sub(decode_escape, path) for path in escaped_paths}


def _list_mounts_below(all_mount_points: set[bytes], directories: Iterable[Path]) -> list[Path]:
    """Return the outermost mount points below `directories`. The file systems of mount points must
    be mounted separately, because an overlay of a directory does not contain other file systems."""
    prefixes = tuple(os.fsencode(directory) + b"/" for directory in directories)
    mount_points: list[bytes] = []
    for mount_point in sorted(all_mount_points):
        if not mount_point.startswith(prefixes):
            continue

        outer_prefixes = tuple(outer_mount_point + b"/" for outer_mount_point in mount_points)
        if not mount_point.startswith(outer_prefixes) and os.path.exists(mount_point):
            mount_points.append(mount_point)

    return [Path(os.fsdecode(mount_point)) for mount_point in mount_points]


def _mount_layer(source_path: Path, target_path: Path, layer_path: Path) -> None:
    """Mount a directory of the machine at `target_path`. Changes of files in this directory go to
    an overlay in the directory `layer_path`."""
    if _find_top_level(source_path) in KERNEL_DIRECTORIES:
        _bind_mount(
            source_path,
            target_path,
            is_read_only=source_path.parts[1] != "proc",
            is_recursive=False,
        )
    elif not (source_path.is_dir() and _mount_overlay(source_path, target_path, layer_path)):
        _bind_mount(source_path, target_path, is_read_only=True)


def _mount_overlay(source_path: Path, target_path: Path, layer_path: Path) -> bool:
    """Mount an overlay of `source_path` at `target_path`. Return False if the kernel refuses the
    overlay."""
    for folder in (layer_path, layer_path / "upper", layer_path / "work"):
        folder.mkdir()
    lower, layer = (re.sub(r"([\\\\:,])", r"\\\1", str(path)) for path in (source_path, layer_path))
    mount_options = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work"
    # an unprivileged user needs the option userxattr to mount an overlay
    return not all(
        LIBC.mount(
            b"overlay",
            os.fsencode(target_path),
            b"overlay",
            0,
            os.fsencode(mount_options + extra_option),
        )
        for extra_option in ("", ",userxattr")
    )


def _bind_mount(
    source_path: Path, target_path: Path, is_read_only: bool, is_recursive: bool = True
) -> None:
    """Bind-mount `source_path` at `target_path`. With `is_recursive`, `is_read_only` also
    applies to all mounts below `target_path`."""
    path = os.fsencode(target_path)
    recursion_flag = AT_RECURSIVE if is_recursive else 0
    _raise_on_error(
        LIBC.mount(os.fsencode(source_path), path, None, MS_BIND | MS_REC, None), "mount"
    )
    mount_attributes = (ctypes.c_uint64 * 4)(MS_RDONLY)
    if is_read_only and LIBC.syscall(
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        path,
        recursion_flag,
        mount_attributes,
        ctypes.sizeof(mount_attributes),
    ):
        mount_flags = (
            os.statvfs(target_path).f_flag & LOCKED_FLAGS | MS_BIND | MS_REMOUNT | MS_RDONLY
        )
        _raise_on_error(LIBC.mount(None, path, None, mount_flags, None), "mount")


def _make_root_mount_points(
    top_level_paths: Iterable[Path], root: Path, declared_paths: Iterable[Path]
) -> Iterator[Path]:
    """Create mount points in `root` for the entries of /. Yield the paths to mount at these mount
    points. In a system directory with declared paths, each entry that is not declared is mounted
    separately."""
    private_tree: dict[str, Any] = {}
    for path in declared_paths:
        if _find_top_level(path) in SYSTEM_DIRECTORIES - KERNEL_DIRECTORIES:
            subtree = private_tree
            for path_part in path.parts[1:]:
                subtree = subtree.setdefault(path_part, {})

    for source_path in top_level_paths:
        target_path = root / source_path.name
        if target_path.is_symlink():
            continue

        if source_path.is_symlink():
            target_path.symlink_to(os.readlink(source_path))
        elif source_path.name in private_tree:
            yield from _mirror_public_entries(
                source_path, target_path, private_tree[source_path.name]
            )
        elif source_path.is_dir():
            target_path.mkdir(exist_ok=True)
            yield source_path


def _mirror_public_entries(
    source_path: Path, target_path: Path, private_tree: dict[str, Any]
) -> Iterator[Path]:
    """Make mount points for the entries of a system directory that are not private. Yield the paths
    to mount at these mount points."""
    target_path.mkdir(exist_ok=True)

    for directory_entry in os.scandir(source_path):
        mount_point = target_path / directory_entry.name
        if directory_entry.name in private_tree:
            if private_tree[directory_entry.name] and directory_entry.is_dir():
                yield from _mirror_public_entries(
                    source_path / directory_entry.name,
                    mount_point,
                    private_tree[directory_entry.name],
                )
        elif directory_entry.is_symlink():
            if not mount_point.is_symlink():
                mount_point.symlink_to(os.readlink(directory_entry))
        else:
            _make_mount_point(source_path / directory_entry.name, mount_point)
            yield source_path / directory_entry.name


def _make_mount_point(source_path: Path, target_path: Path) -> None:
    """Make a mount point for `source_path`: an empty file or directory."""
    if source_path.is_dir():
        target_path.mkdir(parents=True, exist_ok=True)
    else:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        target_path.touch()


def _enter_namespace(uid: int, gid: int) -> None:
    """Move this process into a new mount namespace, whose mounts do not reach the machine. Raises
    OSError."""
    # in a container, even root may need a user namespace to call unshare
    if uid or LIBC.unshare(CLONE_NEWNS):
        _raise_on_error(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUSER), "unshare")
        for file_name, file_text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            file_descriptor = os.open(f"/proc/self/{file_name}", os.O_WRONLY)
            os.write(file_descriptor, file_text.encode())
            os.close(file_descriptor)
    _raise_on_error(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")


def _raise_on_error(return_code: int, call_name: str) -> None:
    """Raise OSError with the system's errno if `return_code` is not 0."""
    if return_code:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{call_name}: {os.strerror(error_number)}")
