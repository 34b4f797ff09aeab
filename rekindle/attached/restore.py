"""Chooses the state from which a program continues: the newest state that all ranks can load.

If the state is not sharded, one rank with a copy is enough, because this rank sends the state to
the other ranks. Shards in memory are used only if the shards of all ranks exist, come from the same
save, and the number of ranks is unchanged. Without usable shards in memory, the ranks load the
newest durable checkpoint. The ranks exchange lists of their saved states, and all ranks choose the
same state.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from rekindle.attached import durable, memory
from rekindle.attached.encoding.payload import Payload, decode_payload
from rekindle.attached.encoding.safe_reader import SafePlanner, SafeReader, decode_named_values
from rekindle.attached.group import Group
from rekindle.attached.memory import SnapshotRecord
from rekindle.attached.state import AttachedObjects, put_local_shards
from rekindle.errors import ConfigError, write_stderr

# `SnapshotRecord.shard` of a state that is not sharded
WHOLE_STATE_SHARD = -1
# key of the unsharded values in a checkpoint of torch.distributed.checkpoint
SHARED_VALUES_KEY = "rest"


class RestoredState(NamedTuple):
    """The state from which a program continues. `tier`: its source, "memory" or "durable"; "" for a
    new program."""

    step: int
    tier: str


class StateCandidate(NamedTuple):
    """A saved state that at least one rank can read. `lineage`: id of the program start that saved
    a snapshot, "" for a durable checkpoint; `world`: number of ranks that saved shards in memory, 0
    otherwise."""

    step: int
    lineage: str
    world: int

    @property
    def tier(self) -> str:
        return "memory" if self.lineage else "durable"


@dataclass
class ReadableCopies:
    """The snapshots and checkpoints that this rank can read."""

    snapshots: dict[SnapshotRecord, Path] = field(default_factory=dict)
    checkpoints: dict[int, Path] = field(default_factory=dict)


class StateSource:
    """The saved states of a program. `run_id`: the id of the training, which is a part of the
    snapshots' file names."""

    def __init__(
        self, process_group: Group, attached_objects: AttachedObjects, folder: Path, run_id: str
    ) -> None:
        self.group = process_group
        self.objects = attached_objects
        self.folder = folder
        self.run_id = run_id
        self.copies = self._find_copies()

    def _find_copies(self) -> ReadableCopies:
        copies = ReadableCopies()
        is_sharded = self.objects.is_sharded
        process_index = self.group.local_index if is_sharded else 0
        for path in memory.list_slot_paths(self.run_id, self.group.host, process_index):
            snapshot_record = memory.read_snapshot_record(path, self.run_id)
            if snapshot_record and (snapshot_record.shard == WHOLE_STATE_SHARD) != is_sharded:
                copies.snapshots[snapshot_record] = path

        copies.checkpoints = durable.list_checkpoints(self.folder, is_sharded=is_sharded)
        other_checkpoints = durable.list_checkpoints(self.folder, is_sharded=not is_sharded)
        if other_checkpoints and not copies.checkpoints:
            layout = "a sharded" if is_sharded else "an unsharded"
            raise ConfigError(
                f"{next(iter(other_checkpoints.values()))} is not a checkpoint of {layout}"
                " model: the model must be sharded in the same way as before. Give this program"
                " another checkpoint folder."
            )
        return copies

    def load_whole_state(self) -> tuple[dict[str, Any], RestoredState] | None:
        """Return the newest unsharded state that any rank has; None if no state exists."""
        for candidate in self._list_candidates():
            state_tree = self._load_own_state(candidate)
            rank_lineages = self.group.gather(state_tree["lineage"] if state_tree else "")
            owner_rank = next((rank for rank, lineage in enumerate(rank_lineages) if lineage), None)
            if owner_rank is None:
                continue

            # the checkpoint folders of two machines may contain different states of the same step
            if set(rank_lineages) != {rank_lineages[owner_rank]}:
                payload_bytes = (
                    Payload(state_tree).to_bytes() if self.group.rank == owner_rank else None
                )
                state_tree = decode_payload(self.group.broadcast(payload_bytes, owner_rank))
            assert state_tree is not None
            return state_tree, RestoredState(candidate.step, candidate.tier)
        return None

    def load_shards(self) -> tuple[dict[str, Any], RestoredState] | None:
        """Load the newest sharded state into the attached objects, and return the values that are
        not sharded; None if no state exists."""
        candidates = self._list_candidates()
        if not candidates:
            return None

        shard_states, shared_states = self.objects.save_shards()
        for candidate in candidates:
            if candidate.lineage:
                shared_values = self._load_shards_in_memory(candidate, shard_states)
            else:
                shared_values = self._load_distributed_checkpoint(
                    candidate.step, shard_states, shared_states
                )
            if shared_values is not None:
                return shared_values, RestoredState(candidate.step, candidate.tier)
        return None

    def _list_candidates(self) -> list[StateCandidate]:
        """Return the usable states, newest first. Among states of the same step, a snapshot in
        memory is listed before a durable checkpoint."""
        offered_candidates: list[tuple[StateCandidate, int]] = [
            (
                StateCandidate(
                    snapshot_record.step, snapshot_record.lineage, snapshot_record.world
                ),
                snapshot_record.shard,
            )
            for snapshot_record in self.copies.snapshots
        ]
        offered_candidates += [
            (StateCandidate(step, "", 0), WHOLE_STATE_SHARD) for step in self.copies.checkpoints
        ]

        ranks_by_candidate: dict[StateCandidate, set[int]] = defaultdict(set)
        shards_by_candidate: dict[StateCandidate, set[int]] = defaultdict(set)
        for rank, rank_offers in enumerate(self.group.gather(offered_candidates)):
            for candidate, shard in rank_offers:
                ranks_by_candidate[candidate].add(rank)
                shards_by_candidate[candidate].add(shard)

        world_size = self.group.world
        if self.objects.is_sharded:
            all_ranks = set(range(world_size))
            readable_by_all = {
                candidate
                for candidate, ranks in ranks_by_candidate.items()
                if not candidate.lineage and ranks == all_ranks
            }
            complete_in_memory = {
                candidate
                for candidate, shards in shards_by_candidate.items()
                if candidate.lineage and candidate.world == world_size and shards == all_ranks
            }
            usable_candidates = [*readable_by_all, *complete_in_memory]
        else:
            usable_candidates = list(ranks_by_candidate)
        # sort by lineage, too: states of the same step may differ in their lineage, and all ranks
        # need the same order
        return sorted(
            usable_candidates,
            key=lambda candidate: (candidate.step, candidate.lineage),
            reverse=True,
        )

    def _load_own_state(self, candidate: StateCandidate) -> dict[str, Any] | None:
        """Return the candidate's state if this rank has an intact copy, else None."""
        if not candidate.lineage:
            path = self.copies.checkpoints.get(candidate.step)
            return self._load_checkpoint_file(path) if path else None

        snapshot_bytes = self._read_snapshot(candidate)
        return decode_payload(snapshot_bytes) if snapshot_bytes is not None else None

    def _load_checkpoint_file(self, path: Path) -> dict[str, Any] | None:
        try:
            return durable.load_checkpoint(path)
        # a damaged file can raise any exception
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            write_stderr(
                f"the checkpoint {path} cannot be used ({reason}): trying the previous one"
            )
            return None

    def _read_snapshot(self, candidate: StateCandidate) -> torch.Tensor | None:
        for snapshot_record, path in self.copies.snapshots.items():
            if (snapshot_record.step, snapshot_record.lineage) == (
                candidate.step,
                candidate.lineage,
            ):
                snapshot_bytes = memory.read_snapshot(path, self.run_id, snapshot_record)
                if snapshot_bytes is None:
                    write_stderr(
                        f"the snapshot of step {snapshot_record.step} in {path} is damaged: it is"
                        " not used"
                    )
                return snapshot_bytes
        return None

    def _load_shards_in_memory(
        self, candidate: StateCandidate, shard_templates: dict[str, Any]
    ) -> dict[str, Any] | None:
        snapshot_bytes = self._read_snapshot(candidate)
        own_shard = -1
        for snapshot_record in self.copies.snapshots:
            if (snapshot_record.step, snapshot_record.lineage) == (
                candidate.step,
                candidate.lineage,
            ):
                own_shard = snapshot_record.shard

        held_shards = self.group.gather(own_shard if snapshot_bytes is not None else -1)
        if set(held_shards) != set(range(self.group.world)):
            return None

        # a process may hold the shard of another rank, because a restart may assign the ranks in
        # another order
        sender_by_receiver = {
            receiver_rank: held_shards.index(receiver_rank)
            for receiver_rank in range(self.group.world)
            if held_shards[receiver_rank] != receiver_rank
        }
        received_bytes = self.group.move(snapshot_bytes, sender_by_receiver)
        assert received_bytes is not None
        state_tree = decode_payload(received_bytes)
        local_shards = state_tree.pop("shards")
        shard_states = put_local_shards(shard_templates, local_shards)
        self.objects.load_shards(shard_states, state_tree["shared"])
        return state_tree

    def _load_distributed_checkpoint(
        self, step: int, shard_states: dict[str, Any], shared_states: dict[str, Any]
    ) -> dict[str, Any] | None:
        path = self.copies.checkpoints[step]
        checkpoint_state: dict[str, Any] = {"shards": shard_states, SHARED_VALUES_KEY: ""}
        shared_values: dict[str, Any] = {}
        problem = ""
        try:
            load(
                checkpoint_state,
                checkpoint_id=path,
                storage_reader=SafeReader(path),
                planner=SafePlanner(),
                process_group=self.group.checkpoints,
            )
            shared_values = decode_named_values(checkpoint_state[SHARED_VALUES_KEY])
        # a damaged checkpoint can raise any exception
        except Exception as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__

        if any(self.group.gather(problem)):
            if problem:
                write_stderr(
                    f"the checkpoint {path} cannot be used ({problem}): trying the previous one"
                )
            return None

        self.objects.load_shards(checkpoint_state["shards"], shared_values["shared"])
        return shared_values
