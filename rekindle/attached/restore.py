"""Chooses the state from which a program continues: the newest state that all ranks can load.

If the state is not sharded, one rank with a copy is enough: it sends the state to the others.
Shards in memory are used only if the shards of all ranks exist, come from the same save, and the
number of ranks is unchanged. Otherwise the ranks load the newest durable checkpoint. The ranks
exchange lists of their states, and all choose the same one.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from rekindle.attached import durable, memory
from rekindle.attached.encoding.payload import Payload, decode
from rekindle.attached.encoding.safe_reader import SafePlanner, SafeReader, decode_values
from rekindle.attached.group import Group
from rekindle.attached.memory import Record
from rekindle.attached.state import Objects, put_local
from rekindle.errors import ConfigError, say

WHOLE = -1  # `Record.shard` of a state that is not sharded
REST = "rest"  # key of the unsharded values in a checkpoint of torch.distributed.checkpoint


class Restored(NamedTuple):
    """The state from which a program continues. `tier`: its source, "memory" or "durable"; "" for a
    new program."""

    step: int
    tier: str


class Candidate(NamedTuple):
    """A saved state that at least one rank can read. `lineage`: "" for a durable checkpoint;
    `world`: number of ranks that saved shards in memory, 0 otherwise."""

    step: int
    lineage: str
    world: int

    @property
    def tier(self) -> str:
        return "memory" if self.lineage else "durable"


@dataclass
class Findings:
    """The snapshots and checkpoints that this rank can read."""

    snapshots: dict[Record, Path] = field(default_factory=dict)
    checkpoints: dict[int, Path] = field(default_factory=dict)


class Source:
    """The saved states of a program. `run`: the id of the run, a part of the snapshots' file
    names."""

    def __init__(self, group: Group, objects: Objects, folder: Path, run: str) -> None:
        self.group = group
        self.objects = objects
        self.folder = folder
        self.run = run
        self.findings = self._find()

    def _find(self) -> Findings:
        findings = Findings()
        is_sharded = self.objects.is_sharded
        index = self.group.local_index if is_sharded else 0
        for path in memory.slot_paths(self.run, self.group.host, index):
            record = memory.read_record(path, self.run)
            if record and (record.shard == WHOLE) != is_sharded:
                findings.snapshots[record] = path

        findings.checkpoints = durable.list_checkpoints(self.folder, sharded=is_sharded)
        others = durable.list_checkpoints(self.folder, sharded=not is_sharded)
        if others and not findings.checkpoints:
            kind = "a sharded" if is_sharded else "an unsharded"
            raise ConfigError(
                f"{next(iter(others.values()))} is not a checkpoint of {kind} model: the model must"
                " be sharded in the same way as before. Give this program another checkpoint"
                " folder."
            )
        return findings

    def load_whole(self) -> tuple[dict[str, Any], Restored] | None:
        """Return the newest unsharded state that any rank has; None if no state exists."""
        for candidate in self._list_candidates():
            tree = self._load_own(candidate)
            lineages = self.group.gather(tree["lineage"] if tree else "")
            owner = next((rank for rank, lineage in enumerate(lineages) if lineage), None)
            if owner is None:
                continue

            # the checkpoint folders of different machines may contain different states of the same
            # step
            if set(lineages) != {lineages[owner]}:
                data = Payload(tree).to_bytes() if self.group.rank == owner else None
                tree = decode(self.group.broadcast(data, owner))
            assert tree is not None
            return tree, Restored(candidate.step, candidate.tier)
        return None

    def load_shards(self) -> tuple[dict[str, Any], Restored] | None:
        """Load the newest sharded state into the objects, and return the values that are not
        sharded; None if no state exists."""
        candidates = self._list_candidates()
        if not candidates:
            return None

        shards, shared = self.objects.save_shards()
        for candidate in candidates:
            if candidate.lineage:
                rest = self._load_shards_in_memory(candidate, shards)
            else:
                rest = self._load_distributed_checkpoint(candidate.step, shards, shared)
            if rest is not None:
                return rest, Restored(candidate.step, candidate.tier)
        return None

    def _list_candidates(self) -> list[Candidate]:
        """Return the usable states, newest first; of the same step, snapshots in memory before
        durable checkpoints."""
        offers: list[tuple[Candidate, int]] = [
            (Candidate(record.step, record.lineage, record.world), record.shard)
            for record in self.findings.snapshots
        ]
        offers += [(Candidate(step, "", 0), WHOLE) for step in self.findings.checkpoints]

        ranks: dict[Candidate, set[int]] = defaultdict(set)
        shards: dict[Candidate, set[int]] = defaultdict(set)
        for rank, found in enumerate(self.group.gather(offers)):
            for candidate, shard in found:
                ranks[candidate].add(rank)
                shards[candidate].add(shard)

        world = self.group.world
        if self.objects.is_sharded:
            usable = [
                candidate
                for candidate in ranks
                if (
                    candidate.world == world and shards[candidate] == set(range(world))
                    if candidate.lineage
                    else len(ranks[candidate]) == world
                )
            ]
        else:
            usable = list(ranks)
        # sort by lineage, too: two lineages may have the same step, and all ranks need the same
        # order
        return sorted(usable, key=lambda item: (item.step, item.lineage), reverse=True)

    def _load_own(self, candidate: Candidate) -> dict[str, Any] | None:
        """Return the candidate's state if this rank has an intact copy, else None."""
        if not candidate.lineage:
            path = self.findings.checkpoints.get(candidate.step)
            return self._load_file(path) if path else None

        data = self._read_snapshot(candidate)
        return decode(data) if data is not None else None

    def _load_file(self, path: Path) -> dict[str, Any] | None:
        try:
            return durable.load_checkpoint(path)
        # a damaged file can raise any exception
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            say(f"the checkpoint {path} cannot be used ({reason}): trying the previous one")
            return None

    def _read_snapshot(self, candidate: Candidate) -> torch.Tensor | None:
        for record, path in self.findings.snapshots.items():
            if (record.step, record.lineage) == (candidate.step, candidate.lineage):
                data = memory.read_snapshot(path, self.run, record)
                if data is None:
                    say(f"the snapshot of step {record.step} in {path} is damaged: it is not used")
                return data
        return None

    def _load_shards_in_memory(
        self, candidate: Candidate, shards: dict[str, Any]
    ) -> dict[str, Any] | None:
        data = self._read_snapshot(candidate)
        own_shard = -1
        for record in self.findings.snapshots:
            if (record.step, record.lineage) == (candidate.step, candidate.lineage):
                own_shard = record.shard

        holders = self.group.gather(own_shard if data is not None else -1)
        if set(holders) != set(range(self.group.world)):
            return None

        # a process may have another rank than before
        transfers = {
            receiver: holders.index(receiver)
            for receiver in range(self.group.world)
            if holders[receiver] != receiver
        }
        received = self.group.move(data, transfers)
        assert received is not None
        tree = decode(received)
        local = tree.pop("shards")
        shard_states = put_local(shards, local)
        self.objects.load_shards(shard_states, tree["shared"])
        return tree

    def _load_distributed_checkpoint(
        self, step: int, shards: dict[str, Any], shared: dict[str, Any]
    ) -> dict[str, Any] | None:
        path = self.findings.checkpoints[step]
        state: dict[str, Any] = {"shards": shards, REST: ""}
        rest: dict[str, Any] = {}
        problem = ""
        try:
            load(
                state,
                checkpoint_id=path,
                storage_reader=SafeReader(path),
                planner=SafePlanner(),
                process_group=self.group.checkpoints,
            )
            rest = decode_values(state[REST])
        # a damaged checkpoint can raise any exception
        except Exception as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__

        if any(self.group.gather(problem)):
            if problem:
                say(f"the checkpoint {path} cannot be used ({problem}): trying the previous one")
            return None

        self.objects.load_shards(state["shards"], rest["shared"])
        return rest
