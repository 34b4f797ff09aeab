"""Viewers of a page are notified about each change of a run, at a limited cost, also while viewers
connect and disconnect."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable

import pytest

from argolocal.page import live
from argolocal.page.live import CHANGES_AT_ONCE, ChangeBudget, Watchers

TIMEOUT_S = 20


class Files:
    """The version of a subject (a run or a list), which a test changes, and the number of times
    that the version was read."""

    def __init__(self, version: str = "1") -> None:
        self.version = version
        self.reads = 0

    def read(self, name: str) -> str:
        self.reads += 1
        return self.version


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(live, "CHECK_INTERVAL_AFTER_CHANGE_S", 0.01)
    monkeypatch.setattr(live, "MAX_CHECK_INTERVAL_S", 0.02)


async def next_of(viewer: AsyncGenerator[str | None]) -> str | None:
    return await asyncio.wait_for(anext(viewer), TIMEOUT_S)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.to_thread(lambda: None)


def test_all_viewers_of_a_run_learn_of_a_change_from_one_watcher() -> None:
    files = Files()

    async def look() -> None:
        watchers = Watchers(files.read)
        viewers = [watchers.versions("run") for _ in range(20)]
        assert {await next_of(viewer) for viewer in viewers} == {"1"}
        assert len(watchers.subjects) == 1

        files.version = "2"
        assert {await next_of(viewer) for viewer in viewers} == {"2"}
        for viewer in viewers:
            await viewer.aclose()

    asyncio.run(look())


def test_a_change_between_two_looks_of_a_slow_viewer_is_not_missed() -> None:
    files = Files()

    async def look() -> None:
        watchers = Watchers(files.read)
        slow = watchers.versions("run")
        fast = watchers.versions("run")
        assert [await next_of(slow), await next_of(fast)] == ["1", "1"]

        # the server does not wait for the slow viewer, which gets only the last version
        for version in ("2", "3"):
            files.version = version
            assert await next_of(fast) == version
        assert await next_of(slow) == "3"
        await slow.aclose()
        await fast.aclose()

    asyncio.run(look())


def test_a_run_without_viewers_is_not_watched_and_is_watched_again_by_the_next() -> None:
    files = Files()

    async def look() -> None:
        watchers = Watchers(files.read)
        for version in ("1", "2"):
            files.version = version
            viewer = watchers.versions("run")
            assert await next_of(viewer) == version
            task = watchers.subjects["run"].task
            assert task
            await viewer.aclose()
            assert not watchers.subjects
            await wait_until(task.done)

    asyncio.run(look())


def test_a_viewer_that_leaves_during_the_first_check_takes_nothing_from_the_next() -> None:
    is_entered = threading.Event()
    may_return = threading.Event()

    def read(name: str) -> str:
        is_entered.set()
        assert may_return.wait(TIMEOUT_S)
        return "1"

    async def look() -> None:
        watchers = Watchers(read)
        first = asyncio.create_task(anext(watchers.versions("run")))
        await wait_until(is_entered.is_set)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        second = watchers.versions("run")
        waiting = asyncio.create_task(next_of(second))
        await wait_until(lambda: "run" in watchers.subjects)
        may_return.set()
        assert await waiting == "1"
        assert watchers.subjects["run"].viewers == 1
        await second.aclose()
        assert not watchers.subjects

    asyncio.run(look())


def test_a_run_that_cannot_be_read_for_a_moment_is_watched_further() -> None:
    files = Files()

    def read(name: str) -> str:
        version = files.read(name)
        if version == "unreadable":
            raise PermissionError("the home")
        return version

    async def look() -> None:
        watchers = Watchers(read)
        viewer = watchers.versions("run")
        assert await next_of(viewer) == "1"
        files.version = "unreadable"
        count = files.reads
        await wait_until(lambda: files.reads > count + 2)
        files.version = "2"
        assert await next_of(viewer) == "2"
        await viewer.aclose()

    asyncio.run(look())


def test_a_silent_run_keeps_the_connection_of_its_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "KEEP_ALIVE_S", 0.05)

    async def look() -> list[str]:
        watchers = Watchers(Files("1").read)
        viewer = watchers.events("run")
        lines = [await asyncio.wait_for(anext(viewer), TIMEOUT_S) for _ in range(3)]
        await viewer.aclose()
        assert not watchers.subjects
        return lines

    retry, version, keep_alive = asyncio.run(look())
    assert retry.startswith("retry: ")
    assert version == "event: version\ndata: 1\n\n"
    assert keep_alive == ": keep-alive\n\n"


def test_the_first_changes_are_shown_at_once_and_a_storm_of_them_is_limited() -> None:
    budget = ChangeBudget(now=0.0)
    first_changes = [budget.spend(0.0, 0.5) for _ in range(CHANGES_AT_ONCE + 1)]
    assert first_changes == [True] * CHANGES_AT_ONCE + [False]

    # 100 changes per second occur for ten seconds
    shown = sum(budget.spend(number / 100, 0.5) for number in range(1, 1001))
    assert 19 <= shown <= 20

    # after a long pause, as many changes are shown at once as at the start, and no more
    after_pause = [budget.spend(1000.0, 0.5) for _ in range(CHANGES_AT_ONCE + 1)]
    assert after_pause == first_changes


def test_a_page_that_is_slow_to_render_changes_less_often() -> None:
    def interval(render_seconds: float) -> float:
        watchers = Watchers(Files().read, lambda name: render_seconds)
        return watchers.change_interval("run")

    assert interval(0.01) == live.CHANGE_INTERVAL_S
    assert interval(1.0) == 1.0 / live.RENDER_SHARE
    assert interval(60.0) == live.MAX_CHANGE_INTERVAL_S
