"""Two at once record one thing, and what is gone, torn or old is not taken."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from rekindle.cache import entries
from rekindle.cache.entries import Entry, Shelf
from rekindle.errors import StorageError
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


def test_an_entry_says_which_run_and_task_it_stands_for() -> None:
    began = time.time()
    made = entry("w-7/prepare")
    assert (made.workflow, made.task) == ("w-7", "prepare")
    assert began <= made.made <= time.time()


def test_an_entry_counts_for_ninety_days(s3: Store) -> None:
    for age, counts in ((90 * 86400 - 60, True), (90 * 86400 + 60, False)):
        made = replace(entry("w-8/prepare"), made=time.time() - age)
        s3.put("w-8/prepare/dataset/part", b"123")
        assert entries.record(s3, made)
        assert (entries.find(s3, made.key) is not None) == counts
        later = replace(made, made=time.time())
        assert entries.record(s3, later) != counts, "one that counts is not replaced"
        assert (entries.read(s3, made.key) == later) != counts
    text = entries.gone(replace(made, made=0), lambda place: (1, 3))
    assert text == "older than 90 days"
    assert entries.gone(later, lambda place: (0, 0)) == "w-8/prepare/dataset is not there any more"
    assert entries.gone(later, lambda place: (1, 3)) == ""


def test_what_another_version_wrote_is_not_known(s3: Store) -> None:
    for number, data in enumerate((b"{", b"[]", b'{"key": "k"}')):
        s3.put(f"cache/other-{number}", data)
        assert entries.read(s3, f"other-{number}") is None and entries.find(s3, f"other-{number}") is None
    made = entry("w-9/prepare")
    entries.record(s3, made)
    assert made.key in {known.key for known in entries.entries(s3)}
    s3.delete([f"cache/other-{number}" for number in range(3)])


def test_prune_keeps_the_newest_of_those_that_count(s3: Store) -> None:
    entries.remove(s3, entries.entries(s3))
    s3.put("w-10/t/dataset/part", b"123")
    made = [replace(entry("w-10/t"), made=time.time() - 100 * number) for number in range(4)]
    for known in made:
        entries.record(s3, known)
    assert [known for known, _ in entries.stale(s3, 2, 90)] == made[2:]
    assert entries.stale(s3, 4, 90) == []
    entries.remove(s3, made)


def test_a_store_that_is_away_knows_nothing_and_breaks_nothing() -> None:
    def away(number: int) -> int:
        raise StorageError(f"{number} is away")

    assert entries.safely(away, 1) is None and entries.safely(lambda number: number + 1, 1) == 2
