"""Tests the object store and MLflow from this machine or pod, with the settings that every step gets.

    python -m rekindle.doctor.probe                   {"object store": [true, "..."], "MLflow": [true, "..."]}
    python -m rekindle.doctor.probe --make-bucket     creates the bucket that S3_BUCKET names, unless it exists

`rekindle doctor` runs it on this machine and in a pod.
"""

import json
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rekindle.errors import ConfigError, Conflict, RekindleError, say
from rekindle.storage import Store

RACERS = 8
Finding = tuple[bool, str]


def store(objects: Store) -> Finding:
    """Test the conditional writes on which checkpoints and the registry rely."""
    key = f"doctor/{uuid.uuid4().hex}"

    def create(racer: int) -> bool:
        try:
            objects.put(key, b"%d" % racer, if_absent=True)
            return True
        except Conflict:
            return False

    try:
        with ThreadPoolExecutor(RACERS) as pool:
            winners = sum(pool.map(create, range(RACERS)))
        stale = objects.get_with_etag(key)[1]
        objects.put(key, b"newer")
        overwritten = True
        try:
            objects.put(key, b"stale", if_match=stale)
        except Conflict:
            overwritten = objects.get(key) != b"newer"
    finally:
        objects.delete([key])
    stale_write = "a stale write was accepted" if overwritten else "a stale write was refused"
    message = f"{objects.address}: {winners} of {RACERS} racing creators won, {stale_write}"
    return winners == 1 and not overwritten, message


def tracking() -> Finding:
    """Search for a run, with the credentials that a step would use."""
    from rekindle import tracking

    tracking.find_run("rekindle-doctor", "none")
    return True, "it answers"


def make_bucket(objects: Store) -> None:
    """Create the bucket unless it exists. Raises StorageError."""
    try:
        next(objects.list("doctor/"), None)
    except ConfigError:  # the store answers, but has no such bucket
        objects.client.create_bucket(Bucket=objects.bucket)


def main() -> int:
    if "--make-bucket" in sys.argv[1:]:
        try:
            make_bucket(Store.from_env().short_retries())
        except RekindleError as error:
            say(f"error: {error}")
            return error.exit_code
        return 0
    findings: dict[str, Finding] = {}
    for name, check in CHECKS.items():
        try:
            findings[name] = check()
        except RekindleError as error:
            findings[name] = False, str(error)
    print(json.dumps(findings))
    return 0


CHECKS: dict[str, Callable[[], Finding]] = {
    "object store": lambda: store(Store.from_env().short_retries()),
    "MLflow": tracking,
}

if __name__ == "__main__":
    sys.exit(main())
