"""The handshake of a worker and its coordinator: each proves that it knows the run's secret,
without revealing it.

    coordinator → worker    {"nonce": C}
    worker → coordinator    {"nonce": W, "proof": HMAC-SHA256(secret, "worker C W")}
    coordinator → worker    {"proof": HMAC-SHA256(secret, "coordinator C W")}

Until both sides have proved this, neither side accepts any other message. Later messages are
neither encrypted nor signed: only the network itself can protect them from an attacker who modifies
traffic.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
from typing import Any

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_SECRET
from rekindle.training.membership.protocol import encode

MIN_SECRET_LENGTH = 32  # minimum number of characters
MAX_LINE = 512  # maximum number of bytes of a handshake message
TIMEOUT_S = 5.0  # time limit for the worker's proof


def run_secret() -> bytes:
    """Return the secret of this run. Raises ConfigError."""
    secret = os.environ.get(REKINDLE_SECRET, "")
    if len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"{REKINDLE_SECRET} is {'too short' if secret else 'not set'}: the workers and the"
            " coordinator of a run authenticate each other with it. Render the manifest again,"
            f" which creates a Secret for each run; or set it to the same {MIN_SECRET_LENGTH} or"
            " more random characters in all processes of the run."
        )
    return secret.encode()


def nonce() -> str:
    return secrets.token_hex(16)


def proof(secret: bytes, sender: str, coordinator_nonce: str, worker_nonce: str) -> str:
    """Return the HMAC that proves that `sender` ("worker" or "coordinator") knows the secret."""
    return hmac.new(
        secret, f"{sender} {coordinator_nonce} {worker_nonce}".encode(), hashlib.sha256
    ).hexdigest()


def answer(line: bytes, secret: bytes, coordinator_nonce: str) -> bytes:
    """Check the worker's proof in `line`, and return the coordinator's proof.

    Raises ValueError if the proof is wrong.
    """
    message: Any = json.loads(line)
    if not isinstance(message, dict) or not isinstance(worker_nonce := message.get("nonce"), str):
        raise ValueError("no proof")
    _check_proof(message, proof(secret, "worker", coordinator_nonce, worker_nonce))
    return encode({"proof": proof(secret, "coordinator", coordinator_nonce, worker_nonce)})


def introduce(connection: socket.socket, secret: bytes) -> None:
    """Perform the worker's side of the handshake. Raises OSError."""
    try:
        coordinator_nonce = str(json.loads(_read_line(connection))["nonce"])
        worker_nonce = nonce()
        own_proof = proof(secret, "worker", coordinator_nonce, worker_nonce)
        connection.sendall(encode({"nonce": worker_nonce, "proof": own_proof}))
        _check_proof(
            json.loads(_read_line(connection)),
            proof(secret, "coordinator", coordinator_nonce, worker_nonce),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConnectionError(
            f"the other side cannot prove that it is this run's coordinator ({error!r})"
        ) from None


def _check_proof(message: Any, expected_proof: str) -> None:
    if not hmac.compare_digest(
        str(message["proof"]).encode(errors="replace"), expected_proof.encode()
    ):
        raise ValueError("wrong proof")


def _read_line(connection: socket.socket) -> bytes:
    """Read one line. Nothing follows this line: the other side waits for our next message."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(MAX_LINE)
        if not data:
            raise ConnectionError(
                f"connection closed during the handshake: is {REKINDLE_SECRET} the same on both"
                " sides?"
            )
        line += data
        if len(line) > MAX_LINE:
            raise ValueError("line too long")
    return line
