"""A pod's own file system tree without a container: `/` seen from its root directory, with private directories.

A pod sees all files of the machine, except that /tmp and the directories in which the manifest declares files are
private to it. So the path /tmp/out.txt is a different file in each pod: the file of that name below the pod's root. In
a system directory only the declared path is private, and its siblings are the machine's.

As in a container, writes and deletions outside of the private directories never reach the machine: they go to an
overlay (overlayfs, in memory) that ends with the pod. Where the kernel allows no overlay, and on file systems mounted
below, the pod can only read. Where the kernel allows it (to root), one overlay covers the whole machine, and outputs
behind links are read from it; else each directory of / has its own. /dev/shm is the machine's unless a volume is
mounted there.
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

NEWNS, NEWUSER = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18
LOCKED_FLAGS = 2 | 4 | 8  # nosuid, nodev, noexec: a remount must keep them
DETACH = 2
MAX_LINKS = 40  # as many as the kernel follows
MOUNT_SETATTR, RECURSIVE, AT_FDCWD = 442, 0x8000, -100  # since Linux 5.12
KERNEL = {"dev", "proc", "sys"}
SYSTEM = KERNEL | {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "run", "var", "boot"}
PACKAGES = Path(__file__).resolve().parents[2]
SHM = "/dev/shm"
OCTAL = re.compile(rb"\\([0-7]{3})")  # how mountinfo escapes spaces
LIBC = ctypes.CDLL(None, use_errno=True)
Bind = tuple[Path, str, bool]


def unsupported_path(paths: Iterable[str]) -> str | None:
    """The first path that cannot be private: a system directory, or a path below /dev, /proc or /sys."""
    for path in paths:
        top = _top(Path(path))
        if Path(path) != Path(SHM) and (top in KERNEL or (top in SYSTEM and os.path.isdir(path))):
            return path
    return None


def path_in_root(root: Path, path: str) -> Path:
    """The file on this machine that a pod with this root knows as `path`."""
    parts = Path(os.path.normpath(path)).parts[1:]
    if parts[:1] and parts[0] in SYSTEM:  # /bin may be a link
        path = str(Path(os.path.realpath(Path("/", *parts[:-1]))) / parts[-1])
    return root / os.path.normpath(path).lstrip("/")


def resolve_links(path: str, seen: Callable[[Path], Path]) -> Path:
    """`path` in a pod with all links resolved there; `seen` maps a path without links to a file on this machine.

    Raises OSError for a loop of links.
    """
    at, left, links = Path("/"), [*reversed(Path(os.path.normpath(path)).parts[1:])], 0
    while left:
        part = left.pop()
        here = seen(at / part)
        if part == ".." or not here.is_symlink():
            at = at.parent if part == ".." else at / part
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = Path(os.readlink(here))
        at = Path("/") if target.is_absolute() else at
        left += reversed([part for part in target.parts if part != "/"])
    return at


def _top(path: Path) -> str:
    return next(iter(path.parts[1:2]), "")


def succeeds_in_child(action: Callable[[], None]) -> bool:
    """Whether `action` succeeds in a child process."""
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
    """Whether this system allows mount namespaces; tried once."""
    return succeeds_in_child(lambda: _namespace(os.getuid(), os.getgid()))


@cache
def _root_overlay_supported() -> bool:
    """Whether one overlay can cover the whole machine; tried once."""

    def mounted() -> None:
        _namespace(os.getuid(), os.getgid())
        _raise_on_error(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None), "mount")
        view = Path("/tmp/view")
        view.mkdir()
        _raise_on_error(not _mount_overlay(Path("/"), view, Path("/tmp/machine")), "mount")

    return succeeds_in_child(mounted)


class View:
    """What one container sees as `/`: the declared `paths` below `root`, and everything else of the machine.

    `binds`: (source, mount path, read only) of files and directories.
    """

    def __init__(self, root: Path, paths: Iterable[str], binds: Iterable[Bind] = ()) -> None:
        self.root, self.binds = root, [(source, os.path.normpath(at), read_only) for source, at, read_only in binds]
        self.binds.sort(key=lambda bind: bind[1].count("/"))
        named = [*paths, *(at for _, at, _ in self.binds if at != SHM)]
        self.declared = [Path("/", path_in_root(root, path).relative_to(root)) for path in named]
        self.private = {"tmp"} | {_top(path) for path in self.declared} - SYSTEM
        self.sockets: tuple[socket.socket, ...] = ()
        self.fd: int | None = None

    def host_path(self, path: Path, must_exist: bool = False) -> Path:
        """The file on this machine for a pod's `path`, in which only the last part may be a link.

        With `must_exist`, raises OSError if the pod's overlay is gone or the file is the machine's.
        """
        for source, at, _ in reversed(self.binds):
            if path.is_relative_to(at):
                return source / path.relative_to(at)
        if _top(path) in self.private or any(
            path.is_relative_to(declared) for declared in self.declared if declared.parts[1:]
        ):
            return path_in_root(self.root, str(path))
        if self.fd is not None:
            return Path(f"/proc/self/fd/{self.fd}") / path.relative_to("/")
        if not os.path.lexists(Path("/", *path.parts[1:2])):
            return path_in_root(self.root, str(path))
        if must_exist:
            raise OSError(errno.ENOENT, "a link leads to it, out of the directories that the template names", str(path))
        return path

    def prepare(self, keep: Iterable[Path]) -> Callable[[], None]:
        """Prepares the directories; returns what the new process calls, which makes system calls only.

        `keep`: paths that must stay visible. Raises OSError.
        """
        root, kept = self.root, self._make_mount_points(keep)
        whole = _root_overlay_supported() and self._has_own_top_levels()  # after the mount points exist
        scratch, points = root / ".layers", _mount_points()
        scratch.mkdir(exist_ok=True)
        tops = [Path(entry.path) for entry in os.scandir("/") if entry.name not in self.private]
        if whole:
            view, layers = scratch / "view", [top for top in tops if top.name in KERNEL or os.fsencode(top) in points]
        else:  # private files are next to mounts of the machine's, in root itself
            view, layers = root, [*_make_top_level(tops, root, self.declared)]
        mounted = _mounts_below(points, [top for top in tops if top.name not in KERNEL])
        within = {path: _mounts_below(points, [path]) for path in kept}
        own = [name for name in os.listdir(root) if whole and name in self.private]
        seen = [*((path, str(path), None) for path in kept), *self.binds]
        shown = [(source, path_in_root(view, at), read_only) for source, at, read_only in seen]
        shown.sort(key=lambda bind: len(bind[1].parts))
        uid, gid = os.getuid(), os.getgid()
        self.sockets = ours, theirs = socket.socketpair()
        ours.setblocking(False)

        def mirror(paths: list[Path]) -> None:
            for path in paths:
                with contextlib.suppress(OSError):  # mounts may change meanwhile
                    _bind(path, view / path.relative_to("/"), read_only=True)

        def enter() -> None:
            _namespace(uid, gid)
            _raise_on_error(LIBC.mount(b"none", os.fsencode(scratch), b"tmpfs", 0, None), "mount")
            if whole:
                view.mkdir()
                _raise_on_error(not _mount_overlay(Path("/"), view, scratch / "machine"), "mount")
            for number, source in enumerate(layers):
                _mount_layer(source, view / source.relative_to("/"), scratch / str(number))
            for name in own:
                if (view / name).is_symlink() or not (view / name).is_dir():
                    (view / name).unlink(missing_ok=True)
                    (view / name).mkdir()
                _bind(root / name, view / name, read_only=False)
            mirror(mounted)
            for number, (source, target, read_only) in enumerate(shown):
                if read_only is None:
                    _mount_layer(source, target, scratch / f"kept{number}")
                    mirror(within[source])
                else:
                    _bind(source, target, read_only)
            if whole:
                socket.send_fds(theirs, [b"/"], [os.open(view, os.O_PATH)])
            else:
                _raise_on_error(LIBC.umount2(os.fsencode(scratch), DETACH), "umount")  # still used by the overlays
            os.chroot(view)
            os.chdir("/")

        return enter

    def child_started(self) -> None:
        """Called after the start, successful or not: keeps the overlay readable for as long as this object exists."""
        ours, theirs = self.sockets
        with contextlib.suppress(BlockingIOError):
            _, fds, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
            self.fd = fds[0]
            weakref.finalize(self, os.close, self.fd)
        ours.close()
        theirs.close()

    def _has_own_top_levels(self) -> bool:
        """Whether all private files are in private directories of /."""
        tops = [(_top(path), path) for path in self.declared]
        return all(top not in SYSTEM and (len(path.parts) > 2 or (self.root / top).is_dir()) for top, path in tops)

    def _make_mount_points(self, keep: Iterable[Path]) -> list[Path]:
        """Makes the private directories and the mount points in them. Returns what of `keep` is mounted there."""
        home = Path(os.environ.get("HOME", "/"))
        tops = {Path("/", _top(path)) for path in self.declared if len(path.parts) > 2}  # /x is a file itself
        for name in self.private:
            if (self.root / name).is_symlink():  # left by an earlier attempt of this pod
                (self.root / name).unlink()
        for path in {Path("/tmp"), *tops, *([home] if home.is_absolute() else [])}:
            if _top(path) in self.private:
                (self.root / path.relative_to("/")).mkdir(parents=True, exist_ok=True)
        (self.root / "tmp").chmod(0o1777)
        packages = (Path(folder) for folder in sys.path if folder.endswith("-packages"))
        needed = {*keep, Path(sys.prefix), Path(sys.base_prefix), PACKAGES, *packages}
        kept = [path for path in needed if _top(path) in self.private]
        for source, path in [*((source, at) for source, at, _ in self.binds), *((path, str(path)) for path in kept)]:
            if path == SHM:
                continue
            _make_mount_point(source, path_in_root(self.root, path))
            for outer, at, _ in self.binds:  # also in the volume mounted above it
                if path != at and Path(path).is_relative_to(at):
                    within = Path("/", Path(path).relative_to(at))
                    if resolve_links(str(within), lambda part: outer / part.relative_to("/")) != within:  # noqa: B023
                        raise OSError(errno.ELOOP, "a link leads out of the volume to where this is mounted", path)
                    _make_mount_point(source, outer / Path(path).relative_to(at))
        return kept


def enter_process_root(pid: int) -> Callable[[], None]:
    """What a new process calls to share the file system tree of the process `pid`. Raises OSError."""
    root, uid, gid = os.open(f"/proc/{pid}/root", os.O_PATH), os.getuid(), os.getgid()

    def enter() -> None:
        if uid:
            _namespace(uid, gid)
        os.fchdir(root)
        os.chroot(".")

    weakref.finalize(enter, os.close, root)
    return enter


def _mount_points() -> set[bytes]:
    with open("/proc/self/mountinfo", "rb") as table:
        return {OCTAL.sub(lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4]) for line in table}


def _mounts_below(points: set[bytes], layers: Iterable[Path]) -> list[Path]:
    """Mount points below the overlaid directories: an overlay does not show them."""
    prefixes = tuple(os.fsencode(layer) + b"/" for layer in layers)
    mounted: list[bytes] = []
    for point in sorted(point for point in points if point.startswith(prefixes)):
        if not point.startswith(tuple(outer + b"/" for outer in mounted)) and os.path.exists(point):
            mounted.append(point)
    return [Path(os.fsdecode(point)) for point in mounted]


def _mount_layer(source: Path, target: Path, own: Path) -> None:
    """Mounts a directory of the machine at `target`; changes go to `own`."""
    if _top(source) in KERNEL:
        _bind(source, target, read_only=source.parts[1] != "proc", recursive=False)
    elif not (source.is_dir() and _mount_overlay(source, target, own)):
        _bind(source, target, read_only=True)


def _mount_overlay(source: Path, target: Path, own: Path) -> bool:
    for folder in (own, own / "upper", own / "work"):
        folder.mkdir()
    lower, upper = (re.sub(r"([\\\\:,])", r"\\\1", str(path)) for path in (source, own))
    options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work"
    return not all(  # without privileges only with userxattr
        LIBC.mount(b"overlay", os.fsencode(target), b"overlay", 0, os.fsencode(options + also))
        for also in ("", ",userxattr")
    )


def _bind(source: Path, target: Path, read_only: bool, recursive: bool = True) -> None:
    """Bind-mounts `source` at `target`; read only with all mounts below it if `recursive`."""
    at, how = os.fsencode(target), RECURSIVE if recursive else 0
    _raise_on_error(LIBC.mount(os.fsencode(source), at, None, BIND | REC, None), "mount")
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
    if read_only and LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, at, how, attributes, ctypes.sizeof(attributes)):
        flags = os.statvfs(target).f_flag & LOCKED_FLAGS | BIND | REMOUNT | READ_ONLY
        _raise_on_error(LIBC.mount(None, at, None, flags, None), "mount")


def _make_top_level(tops: Iterable[Path], root: Path, declared: Iterable[Path]) -> Iterator[Path]:
    """Makes mount points in `root` for the entries of /; yields the directories to mount there."""
    beside: dict[str, Any] = {}
    for path in declared:
        if _top(path) in SYSTEM - KERNEL:
            place = beside
            for part in path.parts[1:]:
                place = place.setdefault(part, {})
    for source in tops:
        target = root / source.name
        if target.is_symlink():
            continue
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.name in beside:
            yield from _mirror_around(source, target, beside[source.name])
        elif source.is_dir():
            target.mkdir(exist_ok=True)
            yield source


def _mirror_around(source: Path, target: Path, own: dict[str, Any]) -> Iterator[Path]:
    """Makes mount points for the entries of a system directory, except private ones; yields what to mount there."""
    target.mkdir(exist_ok=True)
    for entry in os.scandir(source):
        inside = target / entry.name
        if entry.name in own:
            if own[entry.name] and entry.is_dir():
                yield from _mirror_around(source / entry.name, inside, own[entry.name])
        elif entry.is_symlink():
            if not inside.is_symlink():
                inside.symlink_to(os.readlink(entry))
        else:
            _make_mount_point(source / entry.name, inside)
            yield source / entry.name


def _make_mount_point(source: Path, target: Path) -> None:
    """Makes an empty file or directory, as `source` is, to mount it on."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _namespace(uid: int, gid: int) -> None:
    if uid or LIBC.unshare(NEWNS):  # not root, or root of a container that may not
        _raise_on_error(LIBC.unshare(NEWNS | NEWUSER), "unshare")
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
            os.write(descriptor, text.encode())
            os.close(descriptor)
    _raise_on_error(LIBC.mount(b"none", b"/", None, REC | PRIVATE, None), "mount")


def _raise_on_error(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
