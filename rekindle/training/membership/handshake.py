"""How a worker and its coordinator prove to each other that they know the run's secret, without telling it.

    coordinator → worker    {"nonce": C}
    worker → coordinator    {"nonce": W, "proof": HMAC-SHA256(secret, "worker C W")}
    coordinator → worker    {"proof": HMAC-SHA256(secret, "coordinator C W")}

Neither side takes anything else before. The messages that follow are neither encrypted nor signed: against who can
change the traffic of others only the network itself helps.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
from typing import Any

from rekindle.errors import ConfigError
from rekindle.training.membership.protocol import encode

VARIABLE = "REKINDLE_SECRET"  # of the environment of every process of a run
SHORTEST = 32  # characters of a secret
MAX_LINE = 512  # bytes of a message of a peer that has proved nothing yet
SECONDS = 5.0  # that it has for its proof


def run_secret() -> bytes:
    """The secret of this run. Raises ConfigError."""
    secret = os.environ.get(VARIABLE, "")
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"{VARIABLE} is {'too short' if secret else 'not set'}: by it the workers and the coordinator of a run "
            f"know each other. Render the manifest again, which makes a Secret for each run; or set it to the same "
            f"{SHORTEST} or more random characters in all processes of the run."
        )
    return secret.encode()


def nonce() -> str:
    return secrets.token_hex(16)


def proof(secret: bytes, who: str, coordinators: str, workers: str) -> str:
    """What `who` ("worker" or "coordinator") sends to show that it knows the secret; the others are both nonces."""
    return hmac.new(secret, f"{who} {coordinators} {workers}".encode(), hashlib.sha256).hexdigest()


def answer(line: bytes, secret: bytes, coordinators: str) -> bytes:
    """The coordinator's proof, for the worker's in `line`. Raises ValueError if that is none."""
    message: Any = json.loads(line)
    if not isinstance(message, dict) or not isinstance(workers := message.get("nonce"), str):
        raise ValueError("no proof")
    _check(message, proof(secret, "worker", coordinators, workers))
    return encode({"proof": proof(secret, "coordinator", coordinators, workers)})


def introduce(connection: socket.socket, secret: bytes) -> None:
    """The worker's side. Raises OSError."""
    try:
        coordinators, workers = str(json.loads(_line(connection))["nonce"]), nonce()
        connection.sendall(encode({"nonce": workers, "proof": proof(secret, "worker", coordinators, workers)}))
        _check(json.loads(_line(connection)), proof(secret, "coordinator", coordinators, workers))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConnectionError(f"it does not prove that it is this run's coordinator ({error!r})") from None


def _check(message: Any, expected: str) -> None:
    if not hmac.compare_digest(str(message["proof"]).encode(errors="replace"), expected.encode()):
        raise ValueError("a wrong proof")


def _line(connection: socket.socket) -> bytes:
    """One line. Nothing follows it, as the other side waits for what we send next."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(MAX_LINE)
        if not data:
            raise ConnectionError(f"it closed the connection before its proof: is {VARIABLE} the same as there?")
        line += data
        if len(line) > MAX_LINE:
            raise ValueError("a line that is too long")
    return line
