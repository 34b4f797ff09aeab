"""The handshake in which a worker and its coordinator prove to each other that they know the run's
secret.

    coordinator → worker    {"nonce": C}
    worker → coordinator    {"nonce": W, "proof": HMAC-SHA256(secret, "worker C W")}
    coordinator → worker    {"proof": HMAC-SHA256(secret, "coordinator C W")}

Before the handshake, neither side accepts another message. Messages after the handshake are neither
encrypted nor signed, so the network must protect them against attackers who modify traffic.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_SECRET
from rekindle.training.membership.protocol import Message, encode_message

# minimum number of characters of the run's secret
MIN_SECRET_CHARS = 32
# maximum number of bytes of a handshake message
MAX_LINE_BYTES = 512
# time limit for the worker's proof
PROOF_TIMEOUT_S = 5.0


def read_run_secret() -> bytes:
    """Return the secret of this run. Raises ConfigError."""
    run_secret = os.environ.get(REKINDLE_SECRET, "")
    if len(run_secret) < MIN_SECRET_CHARS:
        secret_problem = "too short" if run_secret else "not set"
        raise ConfigError(
            f"{REKINDLE_SECRET} is {secret_problem}: the workers and the coordinator of a run"
            " authenticate each other with it. Render the manifest again, which creates a Secret"
            f" for each run; or set it to the same {MIN_SECRET_CHARS} or more random characters"
            " in all processes of the run."
        )
    return run_secret.encode()


def create_nonce() -> str:
    return secrets.token_hex(16)


def compute_proof(
    run_secret: bytes, sender_role: str, coordinator_nonce: str, worker_nonce: str
) -> str:
    """Return the HMAC that proves that `sender_role` ("worker" or "coordinator") knows the
    secret."""
    return hmac.new(
        run_secret, f"{sender_role} {coordinator_nonce} {worker_nonce}".encode(), hashlib.sha256
    ).hexdigest()


def verify_and_answer(proof_line: bytes, run_secret: bytes, coordinator_nonce: str) -> bytes:
    """Check the worker's proof in `proof_line`, and return the line with the coordinator's proof.

    Raises ValueError if the worker's proof is wrong.
    """
    message = json.loads(proof_line)
    worker_nonce = message.get("nonce") if isinstance(message, dict) else None
    if not isinstance(worker_nonce, str):
        raise ValueError("no proof")

    _check_proof(message, compute_proof(run_secret, "worker", coordinator_nonce, worker_nonce))
    return encode_message(
        {"proof": compute_proof(run_secret, "coordinator", coordinator_nonce, worker_nonce)}
    )


def authenticate_worker(coordinator_socket: socket.socket, run_secret: bytes) -> None:
    """Perform the worker's side of the handshake. Raises OSError."""
    try:
        coordinator_nonce = str(json.loads(_read_line(coordinator_socket))["nonce"])
        worker_nonce = create_nonce()
        own_proof = compute_proof(run_secret, "worker", coordinator_nonce, worker_nonce)
        coordinator_socket.sendall(encode_message({"nonce": worker_nonce, "proof": own_proof}))
        _check_proof(
            json.loads(_read_line(coordinator_socket)),
            compute_proof(run_secret, "coordinator", coordinator_nonce, worker_nonce),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConnectionError(
            f"the other side cannot prove that it is this run's coordinator ({error!r})"
        ) from None


def _check_proof(message: Message, expected_proof: str) -> None:
    if not hmac.compare_digest(
        str(message["proof"]).encode(errors="replace"), expected_proof.encode()
    ):
        raise ValueError("wrong proof")


def _read_line(peer_socket: socket.socket) -> bytes:
    """Read one line of the handshake. No data may follow the line, since the sender then waits for
    an answer."""
    received_line = b""
    while not received_line.endswith(b"\n"):
        received_bytes = peer_socket.recv(MAX_LINE_BYTES)
        if not received_bytes:
            raise ConnectionError(
                f"the other side closed the connection during the handshake: is {REKINDLE_SECRET}"
                " the same on both sides?"
            )
        received_line += received_bytes
        if len(received_line) > MAX_LINE_BYTES:
            raise ValueError("line too long")
    return received_line
