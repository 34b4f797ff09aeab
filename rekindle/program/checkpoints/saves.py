"""Finds the checkpoints that belong to the same save. Needed for programs that write several files
or folders per save, such as `model.pt` and then `optimizer.pt`, or one file per rank.

Each of these files or folders is a family, whose versions are completed and stored separately. If
the program is killed between two files of a save, the newest versions are of different steps.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from rekindle.program.checkpoints.paths import family_of, save_numbers, without_numbers

# two files without numbers belong to the same save if the time between them is at most this
# fraction of the time to the next version
SAME_SAVE_SHARE = 0.2


class Version(Protocol):
    """A complete version of a checkpoint. `nodes`: number of nodes of the program; `created`: time
    of its last change in seconds."""

    @property
    def path(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def created(self) -> float: ...


V = TypeVar("V", bound=Version)


def choose_versions(versions: Iterable[V]) -> list[V]:
    """Return one version of each family: the newest, or an earlier one if the newest save is
    incomplete because the program was killed. `versions` and the result are sorted, newest first.
    """
    ordered = list(versions)
    families: dict[str, list[V]] = {}
    for version in ordered:
        families.setdefault(family_of(version.path), []).append(version)

    is_changed = True
    while is_changed:
        is_changed = False
        for family in families.values():
            for others in families.values():
                number = _find_save(family, others)
                if number:
                    del family[:number]
                    is_changed = True

    chosen = [family[0] for family in families.values()]
    return sorted(chosen, key=ordered.index)


def _find_save(versions: Sequence[V], others: Sequence[V]) -> int:
    """Return the index of the version that belongs to the same save as the newest of `others`; 0 if
    no version does."""
    if not _are_written_together(versions[0], others[0]):
        return 0
    if save_numbers(versions[0].path):
        if _are_of_ranks(versions[0], others[0]):
            # nodes upload the files of their ranks at different times and skip some saves; files of
            # other ranks may remain from an earlier, larger group
            saves = [save_numbers(item.path) for item in others if item.nodes == versions[0].nodes]
        else:
            saves = [save_numbers(others[0].path)]
        return next((n for n, item in enumerate(versions) if save_numbers(item.path) in saves), 0)

    other = others[0]
    distances_s = [abs(version.created - other.created) for version in versions]
    number = distances_s.index(min(distances_s))
    if number and distances_s[number] > SAME_SAVE_SHARE * distances_s[number - 1]:
        return 0
    return number


def _are_written_together(one: Version, other: Version) -> bool:
    """Return True if a program may write both files in each save: their families differ, and their
    names have the same form."""
    if family_of(one.path) == family_of(other.path):
        return False
    if _are_of_ranks(one, other):
        return True
    is_same_folder = one.path.rpartition("/")[0] == other.path.rpartition("/")[0]
    return is_same_folder and len(save_numbers(one.path)) == len(save_numbers(other.path))


def _are_of_ranks(one: Version, other: Version) -> bool:
    """Return True if two paths differ only in their numbers."""
    return without_numbers(one.path) == without_numbers(other.path)
