"""The sum of several processes equals the sum of one process bit for bit, with the network traffic
of an all-reduce."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.training.group import process_group
from rekindle.training.group.process_group import GroupView, create_process_group, dist
from rekindle.training.group.reduction import CONTROL_VALUE_COUNT, GradientReduction, MemberRequests
from rekindle.training.group.static import StaticGroup
from rekindle.training.group.tree import list_rank_leaves
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState

CPU = torch.device("cpu")
FLAGS = [
    (False, False, True),
    (True, False, False),
    (False, True, True),
    (True, True, False),
    (False, False, False),
]


class RecordingGroup:
    """A process group that records its collective operations, and the count of numbers that it
    sends to single processes."""

    def __init__(self, pg: Any) -> None:
        self.pg, self.names, self.sent = pg, list[str](), 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.names.append(name)
            self.sent += arguments[0][0].numel() if name == "send" else 0
            return getattr(self.pg, name)(*arguments)

        return call


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "COLLECTIVE_TIMEOUT", timedelta(seconds=30))


def leaf_values(state: TrainingState, leaf: int, turn: int) -> tuple[Tensor, list[Tensor]]:
    """Return one virtual worker's loss and gradients; their magnitudes differ so much that each
    order of additions gives a different sum."""
    generator = torch.Generator().manual_seed(100 * turn + leaf)
    scale = 10.0 ** (leaf % 5 - 2)
    gradients = [torch.randn(p.shape, generator=generator) * scale for p in state.parameters]
    return torch.randn((), generator=generator), gradients


def reduce_in_threads(
    leaves: int, group_size: int, turns: int = 1, **config: Any
) -> list[tuple[list[Tensor], RecordingGroup, GradientReduction]]:
    """Reduce the gradients of `turns` steps in a group of threads, which stand for processes;
    return the totals, the process group and the reduction of each rank."""
    store: Any = dist.HashStore()

    def member(rank: int) -> tuple[list[Tensor], RecordingGroup, GradientReduction]:
        torch.manual_seed(0)
        settings = TrainConfig.model_validate(
            {"virtual_workers": leaves, "workers": group_size, **config}
        )
        state = TrainingState(nn.Linear(7, 3), settings, CPU)
        reduction = GradientReduction(state, StaticGroup(CPU, ledger=None).wait)
        pg = RecordingGroup(
            create_process_group(store, rank, group_size, CPU, "127.0.0.1")
            if group_size > 1
            else None
        )
        reduction.view = GroupView(rank, group_size, pg if group_size > 1 else None)
        totals = []

        for turn in range(turns):
            reduction.set_requests(MemberRequests(*FLAGS[(rank + turn) % len(FLAGS)]))
            for leaf in list_rank_leaves(leaves, group_size, rank):
                reduction.add(leaf, *leaf_values(state, leaf, turn))

            totals.append(reduction.reduce()[: state.width + CONTROL_VALUE_COUNT].clone())

        return totals, pg, reduction

    with ThreadPoolExecutor(group_size) as pool:
        return list(pool.map(member, range(group_size)))


@pytest.mark.parametrize(
    ("leaves", "group_size"),
    [(4, 2), (5, 2), (6, 2), (8, 2), (3, 3), (4, 3), (7, 3), (8, 4), (13, 4), (5, 5)],
)
def test_a_group_of_any_size_computes_the_bits_of_one_process(leaves: int, group_size: int) -> None:
    (((*single_sums,), _, reduction),) = reduce_in_threads(leaves, 1, turns=2)
    width = reduction.state.width
    assert not torch.equal(single_sums[0], single_sums[1])

    for totals, pg, _ in reduce_in_threads(leaves, group_size, turns=2):
        for turn, (total, expected) in enumerate(zip(totals, single_sums, strict=True)):
            assert torch.equal(total[: width + 1], expected[: width + 1]), "gradients and loss"
            flags = [
                FLAGS[(rank + turn) % len(FLAGS)]
                for rank in range(group_size)
                for _ in list_rank_leaves(leaves, group_size, rank)
            ]
            assert total[width + 1 :].tolist() == [
                sum(column) for column in zip(*flags, strict=True)
            ]

        # two numbers have only one sum, so an all-reduce may be used
        halves = (leaves, group_size) in ((4, 2), (8, 2))
        assert ("allreduce" in pg.names) == halves
        assert ("send" in pg.names) != halves


@pytest.mark.parametrize(("leaves", "group_size"), [(7, 3), (6, 2)])
def test_a_fast_reduction_is_one_all_reduce(leaves: int, group_size: int) -> None:
    ((single_sums, _, _),) = reduce_in_threads(leaves, 1)
    members = reduce_in_threads(leaves, group_size, reduction="fast")
    for totals, pg, reduction in members:
        assert pg.names == ["allreduce"]
        width = reduction.state.width + 1
        assert torch.allclose(totals[0][:width], single_sums[0][:width], rtol=1e-4, atol=1e-3)
        assert torch.equal(totals[0], members[0][0][0])


def test_each_process_sends_the_others_only_their_slices() -> None:
    for _, pg, reduction in reduce_in_threads(16, 4):
        width = reduction.state.width + CONTROL_VALUE_COUNT
        assert pg.names.count("send") == pg.names.count("recv") == 3
        assert pg.sent == 3 * -(-width // 4), (
            "three quarters of one partial sum: an all-reduce sends as much"
        )


def test_the_reduction_of_later_steps_needs_no_more_memory() -> None:
    for (_, _, once), (_, _, often) in zip(
        reduce_in_threads(11, 3, 2), reduce_in_threads(11, 3, 6), strict=True
    ):
        assert len(once._pool) == len(often._pool) <= 4
        assert once._receive_memory.numel() == often._receive_memory.numel()


def test_doubling_the_virtual_workers_needs_one_more_buffer() -> None:
    assert [len(reduce_in_threads(leaves, 1)[0][2]._pool) for leaves in (1, 2, 4, 8, 16)] == [
        1,
        1,
        2,
        3,
        4,
    ]
