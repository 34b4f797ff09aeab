"""Give a pod its own file system tree without a container: the machine's `/` with private
directories.

A pod sees all files of the machine, except that it has its own /tmp, and its own directories for
files that the manifest declares. For example, /tmp/out.txt is a different file in each pod: on the
machine, it is the file tmp/out.txt below the pod's root directory. In a system directory such as
/usr, only the declared path itself is private.

As in a container, writes and deletions outside of the private directories never reach the machine:
they go to an overlay (overlayfs, in memory) that is deleted with the pod. Where an overlay is
impossible (on some kernels, and on file systems mounted below the overlay), the pod has read-only
access. If the user is root and the kernel allows it, one overlay covers all files of the machine,
and outputs behind links are read from it. Otherwise, each top-level directory has an overlay of its
own. /dev/shm is shared with the machine unless a volume is mounted there.
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
from functools import cache
from pathlib import Path
from typing import Any

NEWNS = 0x00020000
NEWUSER = 0x10000000
READ_ONLY = 1
REMOUNT = 32
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
LOCKED_FLAGS = 2 | 4 | 8  # mount flags that a remount must keep: nosuid, nodev and noexec
DETACH = 2
MAX_LINKS = 40  # the kernel follows at most 40 links
# the system call mount_setattr of Linux 5.12
MOUNT_SETATTR = 442
RECURSIVE = 0x8000
AT_FDCWD = -100
KERNEL_DIRECTORIES = {"dev", "proc", "sys"}
SYSTEM_DIRECTORIES = KERNEL_DIRECTORIES | {
    *("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "run", "var", "boot"),
}
PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
SHM = "/dev/shm"
# an escaped character in /proc/self/mountinfo, for example a space
OCTAL_ESCAPE = re.compile(rb"\\([0-7]{3})")
LIBC = ctypes.CDLL(None, use_errno=True)
Bind = tuple[Path, str, bool]


def unsupported_path(paths: Iterable[str]) -> str | None:
    """Return the first path that cannot be private, because it is a system directory or below /dev,
    /proc or /sys; or None."""
    for path in paths:
        top = _top_level(Path(path))
        if Path(path) != Path(SHM) and (
            top in KERNEL_DIRECTORIES or (top in SYSTEM_DIRECTORIES and os.path.isdir(path))
        ):
            return path
    return None


def path_in_root(root: Path, path: str) -> Path:
    """Return the path on this machine of the file that a pod with the root directory `root` sees at
    `path`."""
    parts = Path(os.path.normpath(path)).parts[1:]
    # the directory, for example /bin, may be a link
    if parts[:1] and parts[0] in SYSTEM_DIRECTORIES:
        path = str(Path(os.path.realpath(Path("/", *parts[:-1]))) / parts[-1])
    return root / os.path.normpath(path).lstrip("/")


def resolve_links(path: str, host_path: Callable[[Path], Path]) -> Path:
    """Resolve all links of `path` in a pod. `host_path` maps a path of the pod without links to a
    file on this machine. Raises OSError for a loop of links."""
    resolved_path = Path("/")
    remaining_names = [*reversed(Path(os.path.normpath(path)).parts[1:])]
    link_count = 0

    while remaining_names:
        name = remaining_names.pop()
        file = host_path(resolved_path / name)
        if name == ".." or not file.is_symlink():
            if name == "..":
                resolved_path = resolved_path.parent
            else:
                resolved_path = resolved_path / name

            continue

        link_count += 1
        if link_count > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

        target = Path(os.readlink(file))
        resolved_path = Path("/") if target.is_absolute() else resolved_path
        remaining_names += reversed([name for name in target.parts if name != "/"])

    return resolved_path


def _top_level(path: Path) -> str:
    return next(iter(path.parts[1:2]), "")


def succeeds_in_child(action: Callable[[], None]) -> bool:
    """Run `action` in a child process. Return True if `action` succeeds."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@cache
def available() -> bool:
    """Return True if this system allows mount namespaces. The result is cached."""
    return succeeds_in_child(lambda: _enter_namespace(os.getuid(), os.getgid()))


@cache
def _root_overlay_supported() -> bool:
    """Return True if one overlay can cover all files of the machine. The result is cached."""

    def mount() -> None:
        _enter_namespace(os.getuid(), os.getgid())
        _raise_on_error(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None), "mount")
        view = Path("/tmp/view")
        view.mkdir()
        _raise_on_error(not _mount_overlay(Path("/"), view, Path("/tmp/machine")), "mount")

    return succeeds_in_child(mount)


class View:
    """The file system tree of one container: the declared `paths` below `root`, and all other files
    of the machine.

    `binds`: (source, mount path, read only) of each mounted file or directory.
    """

    def __init__(self, root: Path, paths: Iterable[str], binds: Iterable[Bind] = ()) -> None:
        self.root = root
        self.binds = [
            (source, os.path.normpath(path), read_only) for source, path, read_only in binds
        ]
        self.binds.sort(key=lambda bind: bind[1].count("/"))
        all_paths = [*paths, *(mount_path for _, mount_path, _ in self.binds if mount_path != SHM)]
        self.declared_paths = [
            Path("/", path_in_root(root, path).relative_to(root)) for path in all_paths
        ]
        self.private_top_levels = {"tmp"} | {
            _top_level(path) for path in self.declared_paths
        } - SYSTEM_DIRECTORIES
        self.sockets: tuple[socket.socket, ...] = ()
        self.fd: int | None = None

    def host_path(self, path: Path, must_exist: bool = False) -> Path:
        """Return the file on this machine for a pod's `path`, of which only the last part may be a
        link.

        With `must_exist`, raises OSError for a file of the machine that no overlay covers.
        """
        for source, mount_path, _ in reversed(self.binds):
            if path.is_relative_to(mount_path):
                return source / path.relative_to(mount_path)

        if _top_level(path) in self.private_top_levels or any(
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
        """Prepare the directories. Return a function that the new process must call to enter the
        tree. The function only makes system calls.

        `paths_to_keep`: paths that must stay visible. Raises OSError.
        """
        root = self.root
        kept_paths = self._make_mount_points(paths_to_keep)
        # the call of `_has_own_top_levels` below requires the mount points
        covers_machine = _root_overlay_supported() and self._has_own_top_levels()
        scratch = root / ".layers"
        machine_mount_points = _mount_points()
        scratch.mkdir(exist_ok=True)

        tops = [
            Path(entry.path)
            for entry in os.scandir("/")
            if entry.name not in self.private_top_levels
        ]

        if covers_machine:
            view = scratch / "view"
            separate_mounts = [
                top
                for top in tops
                if top.name in KERNEL_DIRECTORIES or os.fsencode(top) in machine_mount_points
            ]
        # `root` itself becomes the view, since it contains the private files and the machine's
        # mounts
        else:
            view = root
            separate_mounts = [*_make_root_mount_points(tops, root, self.declared_paths)]

        mount_points = _mounts_below(
            machine_mount_points, [top for top in tops if top.name not in KERNEL_DIRECTORIES]
        )
        nested_mounts = {path: _mounts_below(machine_mount_points, [path]) for path in kept_paths}
        private_names = [
            name for name in os.listdir(root) if covers_machine and name in self.private_top_levels
        ]
        all_binds = [*((path, str(path), None) for path in kept_paths), *self.binds]
        view_binds = [
            (source, path_in_root(view, path), read_only) for source, path, read_only in all_binds
        ]
        view_binds.sort(key=lambda bind: len(bind[1].parts))
        self.sockets = parent_socket, child_socket = socket.socketpair()
        parent_socket.setblocking(False)

        def mirror(paths: list[Path]) -> None:
            for path in paths:
                with contextlib.suppress(OSError):  # another process may remove a mount at any time
                    _bind(path, view / path.relative_to("/"), read_only=True)

        def enter() -> None:
            _enter_namespace(os.getuid(), os.getgid())
            _raise_on_error(LIBC.mount(b"none", os.fsencode(scratch), b"tmpfs", 0, None), "mount")
            if covers_machine:
                view.mkdir()
                _raise_on_error(not _mount_overlay(Path("/"), view, scratch / "machine"), "mount")

            for number, source in enumerate(separate_mounts):
                _mount_layer(source, view / source.relative_to("/"), scratch / str(number))

            for name in private_names:
                if (view / name).is_symlink() or not (view / name).is_dir():
                    (view / name).unlink(missing_ok=True)
                    (view / name).mkdir()

                _bind(root / name, view / name, read_only=False)

            mirror(mount_points)
            for number, (source, target, read_only) in enumerate(view_binds):
                if read_only is None:
                    _mount_layer(source, target, scratch / f"kept{number}")
                    mirror(nested_mounts[source])
                else:
                    _bind(source, target, read_only)

            if covers_machine:
                socket.send_fds(child_socket, [b"/"], [os.open(view, os.O_PATH)])
            else:
                # the overlays still use the tmpfs after this unmount
                _raise_on_error(LIBC.umount2(os.fsencode(scratch), DETACH), "umount")

            os.chroot(view)
            os.chdir("/")

        return enter

    def child_started(self) -> None:
        """Keep the overlay readable while this object exists. Call this method after each attempt
        to start a process, even if it failed."""
        parent_socket, child_socket = self.sockets
        with contextlib.suppress(BlockingIOError):
            _, fds, _, _ = socket.recv_fds(parent_socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
            self.fd = fds[0]
            weakref.finalize(self, os.close, self.fd)
        parent_socket.close()
        child_socket.close()

    def _has_own_top_levels(self) -> bool:
        """Return True if the top-level directory of each private file is private to the pod."""
        tops = [(_top_level(path), path) for path in self.declared_paths]
        return all(
            top not in SYSTEM_DIRECTORIES and (len(path.parts) > 2 or (self.root / top).is_dir())
            for top, path in tops
        )

    def _make_mount_points(self, paths_to_keep: Iterable[Path]) -> list[Path]:
        """Create the private directories and their mount points. Return the paths of the machine
        that private directories hide although the pod needs them. The caller must mount these
        paths."""
        home = Path(os.environ.get("HOME", "/"))
        # top-level directories of the declared paths, except of files directly below /
        tops = {Path("/", _top_level(path)) for path in self.declared_paths if len(path.parts) > 2}

        for name in self.private_top_levels:
            # the link is left from an earlier attempt of this pod
            if (self.root / name).is_symlink():
                (self.root / name).unlink()

        for path in {Path("/tmp"), *tops, *([home] if home.is_absolute() else [])}:
            if _top_level(path) in self.private_top_levels:
                (self.root / path.relative_to("/")).mkdir(parents=True, exist_ok=True)

        (self.root / "tmp").chmod(0o1777)
        packages = (Path(folder) for folder in sys.path if folder.endswith("-packages"))

        visible_paths = {
            *paths_to_keep,
            Path(sys.prefix),
            Path(sys.base_prefix),
            PACKAGES_FOLDER,
            *packages,
        }

        paths_to_mount = [
            path for path in visible_paths if _top_level(path) in self.private_top_levels
        ]
        for source, path in [
            *(bind[:2] for bind in self.binds),
            *((path, str(path)) for path in paths_to_mount),
        ]:
            if path == SHM:
                continue

            _make_mount_point(source, path_in_root(self.root, path))
            # if `path` is inside another volume, the mount point must exist in this volume, too
            for outer_source, mount_path, _ in self.binds:
                if path != mount_path and Path(path).is_relative_to(mount_path):
                    inner_path = Path("/", Path(path).relative_to(mount_path))
                    final_path = resolve_links(
                        str(inner_path),
                        lambda inner: outer_source / inner.relative_to("/"),  # noqa: B023
                    )
                    if final_path != inner_path:
                        raise OSError(
                            errno.ELOOP, "a link leads from the mount path out of the volume", path
                        )

                    _make_mount_point(source, outer_source / Path(path).relative_to(mount_path))

        return paths_to_mount


def enter_process_root(pid: int) -> Callable[[], None]:
    """Return a function that moves a new process into the file system tree of process `pid`. Raises
    OSError."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH)
    uid = os.getuid()
    gid = os.getgid()

    def enter() -> None:
        if uid:
            _enter_namespace(uid, gid)
        os.fchdir(root)
        os.chroot(".")

    weakref.finalize(enter, os.close, root)
    return enter


def _mount_points() -> set[bytes]:
    with open("/proc/self/mountinfo", "rb") as table:
        return {
            OCTAL_ESCAPE.sub(lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4])
            for line in table
        }


def _mounts_below(points: set[bytes], layers: Iterable[Path]) -> list[Path]:
    """Return the outermost mount points below the directories `layers`. These file systems must be
    mounted separately, because an overlay of a directory does not contain them."""
    prefixes = tuple(os.fsencode(layer) + b"/" for layer in layers)
    mount_points: list[bytes] = []
    for point in sorted(point for point in points if point.startswith(prefixes)):
        if not point.startswith(tuple(outer + b"/" for outer in mount_points)) and os.path.exists(
            point
        ):
            mount_points.append(point)
    return [Path(os.fsdecode(point)) for point in mount_points]


def _mount_layer(source: Path, target: Path, layer: Path) -> None:
    """Mount a directory of the machine at `target`. Changes go to an overlay in the directory
    `layer`."""
    if _top_level(source) in KERNEL_DIRECTORIES:
        _bind(source, target, read_only=source.parts[1] != "proc", recursive=False)
    elif not (source.is_dir() and _mount_overlay(source, target, layer)):
        _bind(source, target, read_only=True)


def _mount_overlay(source: Path, target: Path, layer: Path) -> bool:
    for folder in (layer, layer / "upper", layer / "work"):
        folder.mkdir()
    lower, upper = (re.sub(r"([\\\\:,])", r"\\\1", str(path)) for path in (source, layer))
    options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work"
    # an unprivileged user needs the option userxattr to mount an overlay
    return not all(
        LIBC.mount(b"overlay", os.fsencode(target), b"overlay", 0, os.fsencode(options + extra))
        for extra in ("", ",userxattr")
    )


def _bind(source: Path, target: Path, read_only: bool, recursive: bool = True) -> None:
    """Bind-mount `source` at `target`. With `recursive`, `read_only` also applies to all mounts
    below `target`."""
    path = os.fsencode(target)
    recursion = RECURSIVE if recursive else 0
    _raise_on_error(LIBC.mount(os.fsencode(source), path, None, BIND | REC, None), "mount")
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
    if read_only and LIBC.syscall(
        MOUNT_SETATTR, AT_FDCWD, path, recursion, attributes, ctypes.sizeof(attributes)
    ):
        flags = os.statvfs(target).f_flag & LOCKED_FLAGS | BIND | REMOUNT | READ_ONLY
        _raise_on_error(LIBC.mount(None, path, None, flags, None), "mount")


def _make_root_mount_points(
    top_level_paths: Iterable[Path], root: Path, declared_paths: Iterable[Path]
) -> Iterator[Path]:
    """Create mount points in `root` for the entries of /. Yield the directories to mount there."""
    private_tree: dict[str, Any] = {}
    for path in declared_paths:
        if _top_level(path) in SYSTEM_DIRECTORIES - KERNEL_DIRECTORIES:
            subtree = private_tree
            for name in path.parts[1:]:
                subtree = subtree.setdefault(name, {})

    for source in top_level_paths:
        target = root / source.name
        if target.is_symlink():
            continue

        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.name in private_tree:
            yield from _mirror_public_entries(source, target, private_tree[source.name])
        elif source.is_dir():
            target.mkdir(exist_ok=True)
            yield source


def _mirror_public_entries(
    source: Path, target: Path, private_tree: dict[str, Any]
) -> Iterator[Path]:
    """Make mount points for the entries of a system directory that are not private. Yield the paths
    to mount."""
    target.mkdir(exist_ok=True)

    for entry in os.scandir(source):
        mount_point = target / entry.name
        if entry.name in private_tree:
            if private_tree[entry.name] and entry.is_dir():
                yield from _mirror_public_entries(
                    source / entry.name, mount_point, private_tree[entry.name]
                )
        elif entry.is_symlink():
            if not mount_point.is_symlink():
                mount_point.symlink_to(os.readlink(entry))
        else:
            _make_mount_point(source / entry.name, mount_point)
            yield source / entry.name


def _make_mount_point(source: Path, target: Path) -> None:
    """Make a mount point for `source`: an empty file or directory."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _enter_namespace(uid: int, gid: int) -> None:
    # in a container, even root may need a user namespace to call unshare
    if uid or LIBC.unshare(NEWNS):
        _raise_on_error(LIBC.unshare(NEWNS | NEWUSER), "unshare")
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
            os.write(descriptor, text.encode())
            os.close(descriptor)
    _raise_on_error(LIBC.mount(b"none", b"/", None, REC | PRIVATE, None), "mount")


def _raise_on_error(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
