import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.sampler import Sampler, mix_seed

runs = st.tuples(
    st.integers(1, 50), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**63 - 1)
)


@given(runs)
def test_every_epoch_visits_every_sample_exactly_once(run: tuple[int, int, int, int]) -> None:
    samples, batch, virtual, seed = run
    sampler = Sampler(samples, batch, virtual, seed)
    steps = -(-3 * samples // (batch * virtual))
    stream = torch.cat(
        [
            sampler.select_sample_indices(step, leaf)
            for step in range(steps)
            for leaf in range(virtual)
        ]
    )
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples].tolist()) == list(
            range(samples)
        )


@given(runs, st.integers(0, 10**6), st.data())
def test_a_resumed_run_sees_the_samples_of_an_undisturbed_run(
    run: tuple[int, int, int, int], step: int, data: st.DataObject
) -> None:
    samples, batch, virtual, seed = run
    leaf = data.draw(st.integers(0, virtual - 1))
    used = Sampler(samples, batch, virtual, seed)
    fresh_sampler = Sampler(samples, batch, virtual, seed)
    used.select_sample_indices(0, 0)
    assert (
        used.select_sample_indices(step, leaf).tolist()
        == fresh_sampler.select_sample_indices(step, leaf).tolist()
    )
    assert len(fresh_sampler.select_sample_indices(step, leaf)) == batch


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = [
        Sampler(100, 100, 1, seed).select_sample_indices(step, 0).tolist()
        for seed in (0, 1)
        for step in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4


@given(st.lists(st.integers(0, 2**63 - 1), min_size=3, max_size=3))
def test_neighbouring_steps_and_workers_have_different_seeds(numbers: list[int]) -> None:
    seed, step, leaf = numbers
    assert (
        len(
            {
                mix_seed(seed, step, leaf),
                mix_seed(seed + 1, step, leaf),
                mix_seed(seed, step + 1, leaf),
                mix_seed(seed, step, leaf + 1),
            }
        )
        == 4
    )

    assert 0 <= mix_seed(seed, step, leaf) < 2**63
