"""Two at once record one thing, and what is gone, torn or old is not taken."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from rekindle.cache import entries
from rekindle.cache.entries import Entry
from rekindle.cache.shelf import Shelf
from rekindle.storage import Store


def entry(at: str, size: int = 3) -> Entry:
    artifacts = {"dataset": {"sha256": "abc", "files": 1, "bytes": size}}
    return Entry(uuid.uuid4().hex, at, {"digest": "abc"}, artifacts, {"step": "steps.prepare"}, 1.0)


def test_an_entry_counts_once_its_artifacts_are_there_whole(s3: Store) -> None:
    made = entry("w-1/prepare")
    assert entries.record(s3, made)  # a step records before Argo uploads
    assert entries.find(s3, made.key) is None
    s3.put("w-1/prepare/dataset/part", b"12")  # torn
    assert entries.find(s3, made.key) is None
    s3.put("w-1/prepare/dataset/part", b"123")
    s3.put("w-1/prepare/dataset-of-another/part", b"123")
    assert entries.find(s3, made.key) == made
    assert entries.find(s3, made.key, days=-1) is None
    s3.delete(["w-1/prepare/dataset/part"])  # by `rekindle prune`
    assert entries.find(s3, made.key) is None


def test_of_two_at_once_one_is_recorded_and_a_dead_one_is_replaced(s3: Store) -> None:
    made = entry("w-2/prepare")
    several = [replace(made, at=f"w-2/prepare-{number}") for number in range(8)]
    for other in several:
        s3.put(f"{other.at}/dataset/part", b"123")
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda other: entries.record(s3, other), several))
    assert sum(written) == 1
    winner = entries.find(s3, made.key)
    assert winner and winner == several[written.index(True)]
    s3.delete([f"{winner.at}/dataset/part"])
    later = several[written.index(False)]
    assert entries.record(s3, later) and entries.find(s3, made.key) == later


def test_prune_forgets_what_is_old_too_much_or_gone(s3: Store) -> None:
    entries.remove(s3, entries.entries(s3))
    now = datetime.now(UTC).timestamp()
    old, gone, kept, more = (replace(entry(f"w-3/{n}"), made=now - n) for n in (9e6, 30, 10, 20))
    for made in (old, kept, more):
        s3.put(f"{made.at}/dataset/part", b"123")
    for made in (old, gone, kept, more):
        entries.record(s3, made)
    stale = {made.key: why for made, why in entries.stale(s3, 2, 90)}
    assert stale[gone.key] == "more than 2" and "older" in entries.stale(s3, 9, 90)[-1][1]
    assert {made.key for made, _ in entries.stale(s3, 9, 90)} == {old.key, gone.key}
    entries.remove(s3, [made for made, _ in entries.stale(s3, 9, 90)])
    assert {made.key for made in entries.entries(s3)} == {kept.key, more.key}


def test_many_are_looked_up_from_a_book_that_is_never_older_than_they(s3: Store) -> None:
    made = [entry(f"w-5/t{number}") for number in range(25)]
    for known in made:
        s3.put(f"{known.at}/dataset/part", b"123")
        entries.record(s3, known)
    shelf = Shelf(s3, len(made))
    for again in (False, True):  # the second one reads the book
        shelf = Shelf(s3, len(made)) if again else shelf
        assert [shelf.find(known.key) for known in made] == made
        shelf.close()
    assert shelf.new == 0 and shelf.find("unknown") is None
    s3.delete([f"{made[0].at}/dataset/part"])
    moved = replace(made[0], at="w-6/t0")
    s3.put("w-6/t0/dataset/part", b"123")
    assert entries.record(s3, moved)
    entries.remove(s3, [made[1]])
    s3.put("w-5/t2/dataset/part", b"torn")
    later = Shelf(s3, len(made))
    assert [later.find(known.key) for known in made[:4]] == [moved, None, None, made[3]]
