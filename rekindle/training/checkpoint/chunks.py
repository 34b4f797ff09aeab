"""Chunks of checkpoints in the object store. The name of a chunk is the sha256 of its bytes."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from argolocal.errors import InvalidDocument
from rekindle.errors import RekindleError
from rekindle.storage import Store

CHUNK_BYTES = 8 << 20  # size of a chunk, which one request uploads
PARALLEL_REQUESTS = 4  # maximum number of parallel requests per worker


class DamagedChunk(Exception):
    """The bytes of a chunk do not match its name. `sha256`: the hash of the bytes in the store."""

    def __init__(self, name: str, sha256: str) -> None:
        super().__init__(f"the chunk {name} is damaged: its sha256 is {sha256}")
        self.sha256 = sha256


def fetch_chunk(store: Store, key: str, name: str, size: int) -> bytes:
    """Return the `size` bytes of a chunk with the sha256 `name`.

    A damaged chunk is deleted, so that the next checkpoint uploads it again. Raises DamagedChunk,
    NotFound, StorageError.
    """
    sha256 = ""

    # a second attempt, in case the data was damaged in transit
    for _ in range(2):
        try:
            data = store.get(key, max_bytes=size)
        except InvalidDocument:
            break

        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 == name and len(data) == size:
            return data

    with suppress(RekindleError):
        store.delete([key])
    raise DamagedChunk(name, sha256)


def run_parallel(call: Callable[[int], None], numbers: Iterable[int]) -> float:
    """Call `call` for each chunk number in PARALLEL_REQUESTS threads. Return the CPU seconds of all
    calls; raise the first error.

    The threads are daemons, so they do not delay the exit of the process.
    """
    errors: list[BaseException] = []
    seconds: list[float] = []
    queue = iter(numbers)
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number = next(queue, None)
            if number is None:
                break
            try:
                call(number)
            except BaseException as error:
                errors.append(error)
        seconds.append(time.thread_time())

    threads = [
        threading.Thread(target=run, name="chunks", daemon=True) for _ in range(PARALLEL_REQUESTS)
    ]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    if errors:
        raise errors[0]

    return sum(seconds)
