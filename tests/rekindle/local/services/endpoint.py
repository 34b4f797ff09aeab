"""The embedded S3 endpoint as a separate process."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

KEY = "local-key"
SECRET = "local-secret"


class Endpoint:
    """The server's process, and a boto3 client for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start()

    def start(self, port: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "rekindle.local.services.s3",
            "--root",
            str(self.root),
            "--port",
            str(port),
        ]

        env = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        self.process = subprocess.Popen(
            [*command, "--bucket", "data"], stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])
        self.client = self.connect()

    def connect(self, key: str = KEY, secret: str = SECRET, **config: Any) -> Any:
        # the client does not retry, because a retry would hide the errors that tests check
        settings = Config(
            **{"retries": {"total_max_attempts": 1}, "max_pool_connections": 32, **config}
        )
        return boto3.Session().client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            config=settings,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
        )

    def signed(
        self, method: str, path: str, headers: dict[str, str], payload: str = "UNSIGNED-PAYLOAD"
    ) -> dict[str, str]:
        """Return the headers of a request with their signature; `payload`: value of
        x-amz-content-sha256."""
        signer = S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1")
        signer.payload = lambda request: payload  # type: ignore[method-assign]
        request = AWSRequest(
            method, self.url + path, headers={**headers, "Host": f"127.0.0.1:{self.port}"}
        )
        signer.add_auth(request)
        return dict(request.headers.items())

    def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> tuple[int, bytes]:
        """Send exactly the given bytes to the endpoint, and return the status and body of the
        answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
