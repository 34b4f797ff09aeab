"""The workers of a group find each other with authentication, even if the coordinator dies."""

import signal
import sys
import threading
from ipaddress import ip_address
from typing import Any

import psutil
import pytest
import torch

from rekindle.training.group import process_group
from rekindle.training.membership import handshake
from rekindle.training.membership.client import CoordinatorClient
from tests.rekindle.training.crew import SECRET, Crew, Member, make_flags
from tests.waiting import until


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.REKINDLE_SECRET, SECRET)


@pytest.mark.slow
def test_a_worker_listens_only_until_its_group_is_complete(crew: Crew) -> None:
    argv = make_flags("listening", workers=2, steps=10**6, checkpoint_steps=0)
    coordinator = crew.start_coordinator(argv, POD_IP="127.0.0.1")
    pods = [
        crew.start_worker(name, argv, POD_IP=f"127.0.7.{number}")
        for number, name in enumerate("ab", 1)
    ]
    seen = set[str]()

    def trains() -> bool:
        seen.update(str(address) for pod in pods for address in find_listening_addresses(pod))
        return any(" step=" in pod.read_log() for pod in pods)

    crew.until(trains)
    assert not any(find_listening_addresses(pod) for pod in pods)
    assert seen <= {"127.0.7.1", "127.0.7.2"}, "no public TCPStore"
    assert find_listening_addresses(coordinator) == [ip_address("127.0.0.1")]


@pytest.mark.parametrize("is_member", [True, False], ids=["member", "stranger"])
def test_a_process_without_the_secret_cannot_take_a_members_place(
    is_member: bool, monkeypatch: Any
) -> None:
    secrets = {0: SECRET.encode(), 1: SECRET.encode() if is_member else b"?" * 40}
    ranks = threading.local()
    monkeypatch.setattr(process_group, "read_run_secret", lambda: secrets[ranks.mine])
    store = process_group.dist.HashStore()
    problems = dict[int, str]()

    def member(rank: int) -> None:
        ranks.mine = rank
        pg = process_group.create_process_group(store, rank, 2, torch.device("cpu"), "127.0.0.1")
        try:
            process_group.authenticate_peers(pg, rank, ["a", "b"], 3)
        except RuntimeError as error:
            problems[rank] = str(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(60)

    failure = "peer authentication failed: an unknown process has connected in place of a member"
    assert problems == ({} if is_member else {0: failure, 1: failure})


def find_listening_addresses(member: Member) -> list[Any]:
    connections = psutil.Process(member.process.pid).net_connections("tcp")
    return [
        ip_address(connection.laddr.ip)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def test_values_of_members_survive_the_coordinator(crew: Crew) -> None:
    argv = make_flags("told-on", workers=2, silence_seconds=60)
    coordinator = crew.start_coordinator(argv)
    port = int(crew.meeting["MASTER_PORT"])
    a, b = clients = [
        CoordinatorClient(crew.meeting["MASTER_ADDR"], port, {}, lambda: False) for _ in range(2)
    ]

    waiting = [
        threading.Thread(target=member.wait_for_group, args=(0, -1, lambda: False))
        for member in clients
    ]
    for thread in waiting:
        thread.start()

    for thread in waiting:
        thread.join(120)

    generation = a.published_group[0]
    assert b.published_group == a.published_group
    assert len(a.published_group[1]) == 2
    a.send_value(generation, "early", b"\0\xff" * 1000)
    assert b.wait_for_values(generation, ["early"], 10) == [b"\0\xff" * 1000]
    coordinator.send(signal.SIGKILL)
    coordinator.process.join()
    b.send_value(generation, "late", b"yes")
    crew.start_coordinator(argv)
    assert a.wait_for_values(generation, ["early", "late"], 30) == [b"\0\xff" * 1000, b"yes"]

    with pytest.raises(RuntimeError, match=r"no member has sent never within 0\.1 s"):
        a.wait_for_values(generation, ["never"], 0.1)

    ended: list[int] = []

    def ask() -> None:
        with pytest.raises(RuntimeError, match=f"generation {generation} is over"):
            a.wait_for_values(generation, ["never"], 600)
        ended.append(generation)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    until("a to wait", lambda: sys._current_frames()[asking.ident or 0].f_code.co_name == "wait")
    b.report_failure(generation)
    asking.join(60)
    assert ended == [generation]

    for one in clients:
        one.leave()
