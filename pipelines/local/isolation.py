"""A pod's own file system tree without a container: `/` seen from its root directory, with private directories.

Everything of the machine appears at its place (recursive binds in a private mount namespace), except the directories
that the manifest declares files in: those, and /tmp, are the pod's own. So the literal path /tmp/out.txt of one pod
is another file than that of the next, and the path inside is the root directory plus the path outside. In a directory
of the system only the declared path is the pod's own: what lies beside it is seen as it is.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

NEWNS, NEWUSER = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18
LOCKED = 2 | 4 | 8  # nosuid, nodev, noexec: a mount that has them keeps them
KERNEL = {"dev", "proc", "sys"}
SYSTEM = KERNEL | {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "run", "boot"}
LIBC = ctypes.CDLL(None, use_errno=True)


def impossible(paths: Iterable[str]) -> str | None:
    """The first path that cannot be made private: a directory of the system, or one in the kernel's."""
    for path in paths:
        parts = Path(path).parts[1:]
        if parts and (parts[0] in KERNEL or (parts[0] in SYSTEM and (len(parts) == 1 or os.path.isdir(path)))):
            return path
    return None


def below(root: Path, path: str) -> Path:
    """Where the file is that a pod with this root knows as `path`."""
    parts = Path(os.path.normpath(path)).parts[1:]
    if parts[:1] and parts[0] in SYSTEM:  # /bin may be a link
        path = str(Path(os.path.realpath(Path("/", *parts[:-1]))) / parts[-1])
    return root / os.path.normpath(path).lstrip("/")


@cache
def available() -> bool:
    """Whether this system allows it; tried once, in a child."""
    child = os.fork()
    if child == 0:
        try:
            _namespace(os.getuid(), os.getgid())
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def entry(
    root: Path, paths: Iterable[str], keep: Iterable[Path], binds: Iterable[tuple[Path, str, bool]] = ()
) -> Callable[[], None]:
    """What the new process calls to see `root` as `/`. `paths`: files declared in it; `keep`: what must stay visible.

    `binds`: files and directories that lie elsewhere, where they are seen, and whether they are read only.

    Prepares the directories now, so that only system calls remain for the child.
    """
    binds = sorted(binds, key=lambda each: each[1].count("/"))
    declared = [Path("/", below(root, path).relative_to(root)).parts for path in [*paths, *(each[1] for each in binds)]]
    beside: dict[str, Any] = {}
    for parts in declared:
        if len(parts) > 1 and parts[1] in SYSTEM - KERNEL:
            place = beside
            for part in parts[1:]:
                place = place.setdefault(part, {})
    private = {"tmp"} | {parts[1] for parts in declared if parts[1:]} - SYSTEM
    mounts: list[tuple[bytes, bytes]] = []
    for name in sorted(os.listdir("/")):
        source, target = Path("/") / name, root / name
        if name in private or target.is_symlink():
            continue
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif name in beside:
            mounts += _around(source, target, beside[name])
        elif source.is_dir():
            target.mkdir(exist_ok=True)
            mounts.append((os.fsencode(source), os.fsencode(target)))
    kept: list[tuple[Path, str, bool]] = []
    for path in {*keep, Path(sys.prefix), Path(sys.base_prefix), Path.cwd(), Path(__file__).parents[2]}:
        if path.parts[1:2] and path.parts[1] in private:
            kept.append((path, str(path), False))
    for name in {"tmp"} | {parts[1] for parts in declared if len(parts) > 2} - SYSTEM:  # /x is a file itself
        (root / name).mkdir(mode=0o777, exist_ok=True)
    sealed: list[tuple[bytes, int]] = []
    for source, path, read_only in [*binds, *kept]:
        inside = below(root, path)
        _place(source, inside)
        for outer, at, _ in binds:  # its place is in the volume that lies there
            if path != at and Path(path).is_relative_to(at):
                _place(source, outer / Path(path).relative_to(at))
        mounts.append((os.fsencode(source), os.fsencode(inside)))
        if read_only:
            sealed.append((os.fsencode(inside), os.statvfs(source).f_flag & LOCKED | BIND | REMOUNT | READ_ONLY))
    uid, gid, new_root = os.getuid(), os.getgid(), os.fsencode(root)

    def enter() -> None:
        _namespace(uid, gid)
        for source, target in mounts:
            _checked(LIBC.mount(source, target, None, BIND | REC, None), "mount")
        for target, flags in sealed:
            _checked(LIBC.mount(None, target, None, flags, None), "mount")
        os.chroot(new_root)
        os.chdir("/")

    return enter


def _around(source: Path, target: Path, own: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    """Mounts of all that a directory of the system holds, but for what is the pod's own there."""
    target.mkdir(exist_ok=True)
    for each in os.scandir(source):
        inside = target / each.name
        if each.name in own:
            if own[each.name] and each.is_dir():
                yield from _around(source / each.name, inside, own[each.name])
        elif each.is_symlink():
            if not inside.is_symlink():
                inside.symlink_to(os.readlink(each))
        else:
            _place(source / each.name, inside)
            yield os.fsencode(each), os.fsencode(inside)


def _place(source: Path, target: Path) -> None:
    """Something of the kind of `source` to mount it on."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _namespace(uid: int, gid: int) -> None:
    if uid or LIBC.unshare(NEWNS):  # not root, or root of a container that may not
        _checked(LIBC.unshare(NEWNS | NEWUSER), "unshare")
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
            os.write(descriptor, text.encode())
            os.close(descriptor)
    _checked(LIBC.mount(b"none", b"/", None, REC | PRIVATE, None), "mount")


def _checked(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
