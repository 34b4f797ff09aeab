"""Spot-interruption notices: the workers leave in time without losing work, and none is started on
the node again."""

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rekindle.training.launch import notice
from tests.rekindle.training.crew import Crew, flags

EVENT = {
    "EventType": "Preempt",
    "Resources": ["aks-spot_3", "aks-spot_4"],
    "EventStatus": "Scheduled",
}


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of AWS and Azure, as documented."""

    def do_PUT(self) -> None:
        valid = (
            self.path == "/latest/api/token"
            and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        )
        self._answer(200 if valid else 400, "the-token")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        server = self.server
        events: Any = getattr(server, "events", [])

        if path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "the-token":
                code = 401
            else:
                if events:
                    code = 200
                else:
                    code = 404

            self._answer(code, '{"action": "terminate", "time": "2026-11-23T08:22:00Z"}')
        elif path == "/metadata/instance/compute/name":
            self._answer(200 if self.headers["Metadata"] else 400, "aks-spot_3")
        else:
            self._answer(200 if self.headers["Metadata"] else 400, json.dumps({"Events": events}))

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def cloud() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def address(cloud: Any) -> str:
    return f"127.0.0.1:{cloud.server_address[1]}"


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_a_notice_is_recognized_and_other_machines_notices_are_ignored(
    cloud: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notice.NOTICE_VARIABLE, f"{name} {address(cloud)}")
    assert not notice.is_interruption_announced()
    cloud.events = [EVENT]
    assert notice.is_interruption_announced()
    cloud.events = [EVENT | {"Resources": ["aks-spot_9"]}, EVENT | {"EventType": "Freeze"}]
    assert notice.is_interruption_announced() == (name == "aws")


def test_an_unreachable_metadata_service_counts_as_no_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("", "aws 127.0.0.1:1", "azure 127.0.0.1:1", "none-such"):
        monkeypatch.setenv(notice.NOTICE_VARIABLE, value)
        assert not notice.is_interruption_announced()


def test_workers_leave_a_node_after_a_notice_and_none_is_started_there(
    cloud: Any, toy_dataset: None, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "shm").mkdir()
    crew = Crew(s3_environment | {"REKINDLE_SHM": str(tmp_path / "shm")}, tmp_path)
    environment = {"MASTER_ADDR": "", "REKINDLE_NOTICE": f"aws {address(cloud)}"}

    try:
        prefix = "notice"
        launcher = crew.light_launcher(prefix, flags(prefix, steps=1_000_000), **environment)
        crew.until(lambda: "loss" in launcher.said(), 60)
        cloud.events = [EVENT]
        assert launcher.code() == 143, launcher.said()
        assert "about to be interrupted: its workers leave" in launcher.said()
        again = crew.light_launcher(
            f"{prefix}-again", flags(prefix, steps=1_000_000), **environment
        )
        crew.until(lambda: "no worker is started on it" in again.said(), 60)
        again.send(signal.SIGTERM)
        assert again.code() == 143 and "loss" not in again.said(), again.said()
    finally:
        crew.close()
