"""Which checkpoints go: never one that somebody needs or reads."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rekindle.storage import Entry, Store
from rekindle.training.checkpoint.retention import Retention
from tests.rekindle.training.saving import Open, begin, keys, train


def test_old_checkpoints_go_and_the_kept_ones_stay_whole(open_: Open) -> None:
    first = open_(keep_checkpoints=2)
    for step in range(1, 6):
        train(first, step)
    store, manifests = first.remote.store, keys(first, "manifests/")
    assert [json.loads(store.get(key))["step"] for key in manifests] == [4, 5]
    needed = {chunk for key in manifests for chunk in json.loads(store.get(key))["chunks"]}
    assert {key.rsplit("/", 1)[1] for key in keys(first, "chunks/")} == needed


def test_nothing_is_deleted_while_somebody_reads(open_: Open, s3: Store) -> None:
    first = open_(keep_checkpoints=2)
    lease = f"{first.remote.prefix}/readers/somebody"
    s3.put(lease, b"")
    for step in range(1, 5):
        train(first, step)
    assert len(keys(first, "manifests/")) == 4
    s3.delete([lease])
    train(first, 5)
    assert len(keys(first, "manifests/")) == 2
    assert begin(open_()) == 5 and not keys(first, "readers/")


NOW = 10**6


@given(
    ages=st.dictionaries(st.integers(1, 30), st.integers(0, 20000), min_size=1),
    number=st.integers(2, 5),
    hours=st.sampled_from([0, 0.5, 2]),
    data=st.data(),
)
def test_retention_keeps_latest_and_the_newest_before_it(
    ages: dict[int, int], number: int, hours: float, data: st.DataObject
) -> None:
    manifests = [Entry(f"{step:04d}", 1, "", NOW - age) for step, age in sorted(ages.items())]
    latest = data.draw(st.sampled_from(manifests)).key
    old = Retention(None, "", number, hours)._old(latest, manifests, NOW)  # type: ignore[arg-type]
    kept = [entry for entry in manifests if entry.key not in old]
    before = [entry for entry in manifests if entry.key < latest][-(number - 1) :]
    young = [entry.key for entry in before if not hours or entry.modified >= NOW - 3600 * hours]
    assert [entry.key for entry in kept if entry.key <= latest] == [*young, latest]
    assert all(entry.modified >= NOW - 3600 for entry in kept if entry.key > latest)
