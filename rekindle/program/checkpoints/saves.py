"""Finds the checkpoints that belong to the same save. The module is needed for programs that write
several files or folders per save, such as `model.pt` and then `optimizer.pt`, or one file per rank.

Each file or folder of a save belongs to a family, whose versions are completed and stored
separately. If the program is killed between two files of a save, the newest versions of the
families are of different steps.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from rekindle.program.checkpoints.paths import make_family_path, parse_save_numbers, replace_numbers

# two files without numbers belong to the same save if the time between them is at most this
# fraction of the time to the next version
SAME_SAVE_INTERVAL_SHARE = 0.2


class CheckpointVersion(Protocol):
    """A complete version of a checkpoint. `nodes`: number of nodes of the program; `created`: time
    of the version's last change in seconds."""

    @property
    def path(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def created(self) -> float: ...


class LocalVersion(NamedTuple):
    """A complete checkpoint in the folder of a node, as a CheckpointVersion."""

    path: str
    nodes: int
    created: float


VersionT = TypeVar("VersionT", bound=CheckpointVersion)


def choose_versions(versions: Iterable[VersionT]) -> list[VersionT]:
    """Return one version of each family: the newest version, or an earlier version if the newest
    save is incomplete because the program was killed. `versions` and the result are sorted, newest
    first.
    """
    ordered_versions = list(versions)
    versions_by_family: dict[str, list[VersionT]] = {}
    for version in ordered_versions:
        versions_by_family.setdefault(make_family_path(version.path), []).append(version)

    is_changed = True
    while is_changed:
        is_changed = False
        for family_versions in versions_by_family.values():
            for other_versions in versions_by_family.values():
                save_index = _find_save_index(family_versions, other_versions)
                if save_index:
                    del family_versions[:save_index]
                    is_changed = True

    chosen_versions = [family_versions[0] for family_versions in versions_by_family.values()]
    return sorted(chosen_versions, key=ordered_versions.index)


def is_save_cut_off(versions: Sequence[CheckpointVersion]) -> bool:
    """Return True if the newest save among the given versions is incomplete. `versions` are sorted,
    newest first."""
    newest_by_family = {make_family_path(version.path): version for version in reversed(versions)}
    return any(
        newest_by_family[make_family_path(version.path)] is not version
        for version in choose_versions(versions)
    )


def _find_save_index(versions: Sequence[VersionT], other_versions: Sequence[VersionT]) -> int:
    """Return the index of the version that belongs to the same save as the newest of
    `other_versions`; 0 if no version belongs to this save."""
    if not _are_written_together(versions[0], other_versions[0]):
        return 0
    if parse_save_numbers(versions[0].path):
        if _differ_only_in_rank(versions[0], other_versions[0]):
            # ignore the numbers of ranks, because nodes upload the files of their ranks at
            # different times and skip some saves, and files of other ranks may remain from an
            # earlier, larger group
            other_save_numbers = [
                parse_save_numbers(other_version.path)
                for other_version in other_versions
                if other_version.nodes == versions[0].nodes
            ]
        else:
            other_save_numbers = [parse_save_numbers(other_versions[0].path)]
        return next(
            (
                version_index
                for version_index, other_version in enumerate(versions)
                if parse_save_numbers(other_version.path) in other_save_numbers
            ),
            0,
        )

    newest_other = other_versions[0]
    distances_s = [abs(version.created - newest_other.created) for version in versions]
    closest_index = distances_s.index(min(distances_s))
    if (
        closest_index
        and distances_s[closest_index] > SAME_SAVE_INTERVAL_SHARE * distances_s[closest_index - 1]
    ):
        return 0
    return closest_index


def _are_written_together(
    first_version: CheckpointVersion, second_version: CheckpointVersion
) -> bool:
    """Return True if a program may write both files in each save: their families differ, and their
    names have the same form."""
    if make_family_path(first_version.path) == make_family_path(second_version.path):
        return False
    if _differ_only_in_rank(first_version, second_version):
        return True
    is_same_folder = first_version.path.rpartition("/")[0] == second_version.path.rpartition("/")[0]
    return is_same_folder and len(parse_save_numbers(first_version.path)) == len(
        parse_save_numbers(second_version.path)
    )


def _differ_only_in_rank(
    first_version: CheckpointVersion, second_version: CheckpointVersion
) -> bool:
    """Return True if two paths differ only in their numbers."""
    return replace_numbers(first_version.path) == replace_numbers(second_version.path)
