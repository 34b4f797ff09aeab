"""Simulate the metadata services of AWS and Azure, as documented."""

import json
from typing import Any

from tests.http_server import Answer, HttpServer, Request

EVENT = {
    "EventType": "Preempt",
    "Resources": ["aks-spot_3", "aks-spot_4"],
    "EventStatus": "Scheduled",
}


class Metadata(HttpServer):
    """A metadata service that announces the interruptions in `events`."""

    def __init__(self) -> None:
        super().__init__(self.describe)
        self.events: list[dict[str, Any]] = []
        self.address = f"127.0.0.1:{self.port}"

    def describe(self, request: Request) -> Answer:
        path = request.path.partition("?")[0]

        if path == "/latest/api/token":
            valid = (
                request.method == "PUT" and request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            )
            return Answer(200 if valid else 400, "the-token")

        if path == "/latest/meta-data/spot/instance-action":
            if request.headers["X-aws-ec2-metadata-token"] != "the-token":
                return Answer(401)
            if not self.events:
                return Answer(404)
            return Answer(200, '{"action": "terminate", "time": "2026-11-23T08:22:00Z"}')

        if not request.headers["Metadata"]:
            return Answer(400)
        if path == "/metadata/instance/compute/name":
            return Answer(200, "aks-spot_3")
        return Answer(200, json.dumps({"Events": self.events}))
