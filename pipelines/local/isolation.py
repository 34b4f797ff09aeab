"""A pod's own file system tree without a container: `/` seen from its root directory, with private directories.

Everything of the machine appears at its place, except the directories that the manifest declares files in: those, and
/tmp, are the pod's own. So the literal path /tmp/out.txt of one pod is another file than that of the next, and the path
inside is the root directory plus the path outside. In a directory of the system only the declared path is the pod's
own: what lies beside it is seen as it is.

As in a container, nothing that a pod writes or deletes elsewhere reaches the machine: it does so in a layer (overlayfs,
in memory) that ends with it. Where the kernel allows no layer, and on file systems mounted below, it can only read.
"""

import contextlib
import ctypes
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

NEWNS, NEWUSER = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18
LOCKED = 2 | 4 | 8  # nosuid, nodev, noexec: a mount that has them keeps them
DETACH = 2
LINKS = 40  # as the kernel follows
MOUNT_SETATTR, RECURSIVE, AT_FDCWD = 442, 0x8000, -100  # of the kernel since 5.12
KERNEL = {"dev", "proc", "sys"}
SYSTEM = KERNEL | {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "run", "boot"}
OCTAL = re.compile(rb"\\([0-7]{3})")  # as mountinfo writes spaces
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


def followed(path: str, place: Callable[[Path], Path]) -> Path:
    """Where the file is that a pod reaches by `path`, whose links are its own; `place` says where a path without is.

    Raises OSError for links that lead round.
    """
    at, left, links = Path("/"), [*reversed(Path(os.path.normpath(path)).parts[1:])], 0
    while left:
        part = left.pop()
        here = place(at / part)
        if part == ".." or not here.is_symlink():
            at = at.parent if part == ".." else at / part
            continue
        links += 1
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = Path(os.readlink(here))
        at = Path("/") if target.is_absolute() else at
        left += reversed([each for each in target.parts if each != "/"])
    return place(at)


def _tops(declared: Iterable[tuple[str, ...]]) -> set[str]:
    """The directories in / that are a pod's own, by the parts of its declared paths."""
    return {"tmp"} | {parts[1] for parts in declared if parts[1:]} - SYSTEM


def own(root: Path, paths: Iterable[str], path: Path) -> Path:
    """Where `path` is of a pod whose declared `paths` these are: its own, or what it sees of the machine."""
    top, declared = path.parts[1:2], [Path(each) for each in paths]
    if top and top[0] in SYSTEM:
        private = any(path.is_relative_to(each) for each in declared)
    else:
        private = {*top} & _tops(each.parts for each in declared) or not os.path.lexists(Path("/", *top))
    return below(root, str(path)) if private else path


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
    root: Path,
    paths: Iterable[str],
    keep: Iterable[Path],
    binds: Iterable[tuple[Path, str, bool]] = (),
    itself: bool = False,
) -> Callable[[], None]:
    """What the new process calls to see `root` as `/`. `paths`: files declared in it; `keep`: what must stay visible.

    `binds`: files and directories that lie elsewhere, where they are seen, and whether they are read only.
    `itself`: whether the root is also seen where it is outside.

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
    private = _tops(declared)
    for name in {"tmp"} | {parts[1] for parts in declared if len(parts) > 2} - SYSTEM:  # /x is a file itself
        (root / name).mkdir(mode=0o777, exist_ok=True)
    volumes = [(source, below(root, path), read_only) for source, path, read_only in binds]
    for (source, inside, _), (_, path, _) in zip(volumes, binds, strict=True):
        _place(source, inside)
        _place_in_volumes(source, path, binds)
    layers: list[Path] = []
    for path in {*keep, Path(sys.prefix), Path(sys.base_prefix), Path.cwd(), Path(__file__).parents[2]}:
        if path.parts[1:2] and path.parts[1] in private:
            _place(path, root / path.relative_to("/"))
            _place_in_volumes(path, str(path), binds)
            layers.append(path)
    for name in sorted(os.listdir("/")):
        source, target = Path("/") / name, root / name
        if name in private or target.is_symlink():
            continue
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif name in beside:
            layers += _around(source, target, beside[name])
        elif source.is_dir():
            target.mkdir(exist_ok=True)
            layers.append(source)
    if itself and root.parts[1] in private:
        _place(root, root / root.relative_to("/"))
    spare = root / ".layers"
    spare.mkdir(exist_ok=True)
    uid, gid, mounted = os.getuid(), os.getgid(), _mounted(layers)

    def enter() -> None:
        _namespace(uid, gid)
        for source, target, read_only in volumes:
            _bind(source, target, read_only)
        _checked(LIBC.mount(b"none", os.fsencode(spare), b"tmpfs", 0, None), "mount")
        for number, source in enumerate(layers):
            _layer(source, root / source.relative_to("/"), spare / str(number))
        for path in mounted:
            with contextlib.suppress(OSError):  # others mount and unmount meanwhile
                _bind(path, root / path.relative_to("/"), read_only=True)
        if itself:  # without what is mounted in it
            _checked(
                LIBC.mount(os.fsencode(root), os.fsencode(root / root.relative_to("/")), None, BIND, None), "mount"
            )
        _checked(LIBC.umount2(os.fsencode(spare), DETACH), "umount")  # the layers keep it
        os.chroot(root)
        os.chdir("/")

    return enter


def _place_in_volumes(source: Path, path: str, binds: list[tuple[Path, str, bool]]) -> None:
    """Makes what `source` is mounted on also in the volumes that lie there."""
    for outer, at, _ in binds:
        if path != at and Path(path).is_relative_to(at):
            _place(source, outer / Path(path).relative_to(at))


def _mounted(layers: list[Path]) -> list[Path]:
    """What is mounted below the layers, which a layer does not show."""
    prefixes = tuple(os.fsencode(layer) + b"/" for layer in layers if layer.parts[1] not in KERNEL)
    with open("/proc/self/mountinfo", "rb") as table:
        points = {OCTAL.sub(lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4]) for line in table}
    found: list[bytes] = []
    for point in sorted(each for each in points if each.startswith(prefixes)):
        if not point.startswith(tuple(each + b"/" for each in found)) and os.path.exists(point):
            found.append(point)
    return [Path(os.fsdecode(each)) for each in found]


def _layer(source: Path, target: Path, own: Path) -> None:
    """Shows a directory of the machine at `target`; what is changed there lies in `own`."""
    if source.parts[1] in KERNEL:
        return _bind(source, target, read_only=source.parts[1] != "proc", recursive=False)
    if source.is_dir():
        for each in (own, own / "upper", own / "work"):
            each.mkdir()
        lower = str(source).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
        options = f"lowerdir={lower},upperdir={own}/upper,workdir={own}/work"
        for also in ("", ",userxattr"):  # without privileges only with it
            if not LIBC.mount(b"overlay", os.fsencode(target), b"overlay", 0, os.fsencode(options + also)):
                return None
    return _bind(source, target, read_only=True)


def _bind(source: Path, target: Path, read_only: bool, recursive: bool = True) -> None:
    """Shows what is at `source` at `target`; read only with all that is mounted below it, or itself alone."""
    at, how = os.fsencode(target), RECURSIVE if recursive else 0
    _checked(LIBC.mount(os.fsencode(source), at, None, BIND | REC, None), "mount")
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
    if read_only and LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, at, how, attributes, ctypes.sizeof(attributes)):
        flags = os.statvfs(target).f_flag & LOCKED | BIND | REMOUNT | READ_ONLY
        _checked(LIBC.mount(None, at, None, flags, None), "mount")


def _around(source: Path, target: Path, own: dict[str, Any]) -> Iterator[Path]:
    """All that a directory of the system holds, but for what is the pod's own there."""
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
            yield source / each.name


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
