"""Chunks of checkpoints in the object store. The name of a chunk is the sha256 of its bytes."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from argolocal.errors import InvalidDocument
from rekindle.errors import RekindleError
from rekindle.storage import Store

# size of a chunk, which one request uploads
CHUNK_BYTES = 8 << 20
# maximum number of parallel requests per worker
PARALLEL_REQUESTS = 4


class DamagedChunk(Exception):
    """The bytes of a chunk do not match its name. `sha256`: the hash of the bytes in the store."""

    def __init__(self, chunk_name: str, sha256: str) -> None:
        super().__init__(f"the chunk {chunk_name} is damaged: its sha256 is {sha256}")
        self.sha256 = sha256


def fetch_chunk(store: Store, chunk_key: str, chunk_name: str, chunk_bytes: int) -> bytes:
    """Return the `chunk_bytes` bytes of a chunk with the sha256 `chunk_name`.

    A damaged chunk is deleted, so that the next checkpoint uploads it again. Raises DamagedChunk,
    NotFound, StorageError.
    """
    sha256 = ""

    # read a second time if the data was damaged, possibly in transit
    for _ in range(2):
        try:
            fetched_bytes = store.get(chunk_key, max_bytes=chunk_bytes)
        except InvalidDocument:
            break

        sha256 = hashlib.sha256(fetched_bytes).hexdigest()
        if sha256 == chunk_name and len(fetched_bytes) == chunk_bytes:
            return fetched_bytes

    with suppress(RekindleError):
        store.delete([chunk_key])
    raise DamagedChunk(chunk_name, sha256)


def run_for_chunks(chunk_function: Callable[[int], None], chunk_numbers: Iterable[int]) -> float:
    """Call `chunk_function` for each chunk number in PARALLEL_REQUESTS threads. Return the CPU
    seconds of all calls; raise the first error.

    The threads are daemons, so that they do not delay the exit of the process.
    """
    thread_errors: list[BaseException] = []
    cpu_seconds: list[float] = []
    number_iterator = iter(chunk_numbers)
    number_lock = threading.Lock()

    def run() -> None:
        while not thread_errors:
            with number_lock:
                chunk_number = next(number_iterator, None)
            if chunk_number is None:
                break
            try:
                chunk_function(chunk_number)
            except BaseException as error:
                thread_errors.append(error)
        cpu_seconds.append(time.thread_time())

    threads = [
        threading.Thread(target=run, name="chunks", daemon=True) for _ in range(PARALLEL_REQUESTS)
    ]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    if thread_errors:
        raise thread_errors[0]

    return sum(cpu_seconds)
