"""Test the object store and MLflow from this machine or pod, with the environment of a step.

    # {"object store": [true, "..."], "MLflow": [true, "..."]}
    python -m rekindle.doctor.probe
    # creates the bucket that S3_BUCKET names, unless it exists
    python -m rekindle.doctor.probe --make-bucket

`rekindle doctor` runs this module on this machine and in a pod.
"""

import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError, Conflict, RekindleError, write_stderr
from rekindle.kubernetes_names import DOCTOR_NAME
from rekindle.storage import Store

WRITER_COUNT = 8
Finding = tuple[bool, str]


def check_store(store: Store) -> Finding:
    """Test the conditional writes that checkpoints and the registry need: of several concurrent
    creates of one object, only one may succeed, and a stale write must be refused."""
    key = f"doctor/{uuid.uuid4().hex}"

    def create(writer_number: int) -> bool:
        try:
            store.put(key, b"%d" % writer_number, if_absent=True)
            return True
        except Conflict:
            return False

    try:
        with ThreadPoolExecutor(WRITER_COUNT) as thread_pool:
            winner_count = sum(thread_pool.map(create, range(WRITER_COUNT)))

        stale_etag = store.get_with_etag(key)[1]
        store.put(key, b"newer")
        is_overwritten = True

        try:
            store.put(key, b"stale", if_match=stale_etag)
        except Conflict:
            is_overwritten = store.get(key) != b"newer"
    finally:
        store.delete([key])

    stale_write = f"a stale write was {'accepted' if is_overwritten else 'refused'}"
    message = (
        f"{store.address}: {winner_count} of {WRITER_COUNT} concurrent creates succeeded,"
        f" {stale_write}"
    )
    return winner_count == 1 and not is_overwritten, message


def check_mlflow() -> Finding:
    """Test MLflow: search for a run, with the credentials of a step."""
    from rekindle import tracking

    tracking.find_run(DOCTOR_NAME, "none")
    return True, "MLflow answers"


def make_bucket(object_store: Store) -> None:
    """Create the bucket of the object store unless the bucket exists. Raises StorageError."""
    try:
        next(object_store.list("doctor/"), None)
    except ConfigError:
        # the object store is reachable, but the bucket does not exist
        object_store.client.create_bucket(Bucket=object_store.bucket)


def main() -> int:
    if "--make-bucket" in sys.argv[1:]:
        try:
            make_bucket(Store.from_env().short_retries())
        except RekindleError as error:
            write_stderr(f"error: {error}")
            return error.exit_code

        return 0

    findings_by_target: dict[str, Finding] = {}
    for name, run_check in CHECKS.items():
        try:
            findings_by_target[name] = run_check()
        except RekindleError as error:
            findings_by_target[name] = False, str(error)

    print(to_json(findings_by_target))
    return 0


CHECKS: dict[str, Callable[[], Finding]] = {
    "object store": lambda: check_store(Store.from_env().short_retries()),
    "MLflow": check_mlflow,
}

if __name__ == "__main__":
    sys.exit(main())
