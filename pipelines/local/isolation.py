"""A pod's own file system tree without a container: `/` seen from its root directory, with private directories.

Everything of the machine appears at its place (recursive binds in a private mount namespace), except the directories
that the manifest declares files in: those, and /tmp, are the pod's own. So the literal path /tmp/out.txt of one pod
is another file than that of the next, and the path inside is the root directory plus the path outside.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

NEWNS, NEWUSER = 0x00020000, 0x10000000
BIND, REC, PRIVATE = 4096, 16384, 1 << 18
SYSTEM = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "dev", "proc", "sys", "run", "boot"}
LIBC = ctypes.CDLL(None, use_errno=True)


def impossible(paths: Iterable[str]) -> str | None:
    """The first path that cannot be made private, as it lies in a directory of the system."""
    return next((path for path in paths if Path(path).parts[1:2] and Path(path).parts[1] in SYSTEM), None)


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
    root: Path, paths: Iterable[str], keep: Iterable[Path], binds: Iterable[tuple[Path, str]] = ()
) -> Callable[[], None]:
    """What the new process calls to see `root` as `/`. `paths`: files declared in it; `keep`: what must stay visible.

    `binds`: directories that lie elsewhere, and where they are seen.

    Prepares the directories now, so that only system calls remain for the child.
    """
    declared = [Path(path).parts for path in paths]
    private = {"tmp"} | {parts[1] for parts in declared} - SYSTEM
    mounts: list[tuple[bytes, bytes]] = []
    for name in sorted(os.listdir("/")):
        source, target = Path("/") / name, root / name
        if name in private or target.is_symlink():
            continue
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            target.mkdir(exist_ok=True)
            mounts.append((os.fsencode(source), os.fsencode(target)))
    for path in {*keep, Path(sys.prefix), Path(sys.base_prefix), Path.cwd(), Path(__file__).parents[2]}:
        if path.parts[1:2] and path.parts[1] in private:
            inside = root / path.relative_to("/")
            inside.mkdir(parents=True, exist_ok=True)
            mounts.append((os.fsencode(path), os.fsencode(inside)))
    for name in {"tmp"} | {parts[1] for parts in declared if len(parts) > 2} - SYSTEM:  # /x is a file itself
        (root / name).mkdir(mode=0o777, exist_ok=True)
    for source, path in binds:
        inside = root / path.lstrip("/")
        for each in (source, inside):
            each.mkdir(parents=True, exist_ok=True)
        mounts.append((os.fsencode(source), os.fsencode(inside)))
    uid, gid, new_root = os.getuid(), os.getgid(), os.fsencode(root)

    def enter() -> None:
        _namespace(uid, gid)
        for source, target in mounts:
            _checked(LIBC.mount(source, target, None, BIND | REC, None), "mount")
        os.chroot(new_root)
        os.chdir("/")

    return enter


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
