"""An S3 endpoint for one machine, which stores objects as files, with correct conditional writes.

    python -m rekindle.local.services.s3 --root .rekindle/s3 --port 9000 --bucket rekindle

No installable server supports conditional writes and keeps objects in files: moto holds everything
in memory; rclone, s3rver and localbucket accept a conditional write that must fail; ministack
answers 200 after a failed disk write.

The S3 endpoint supports the requests of boto3, polars and MLflow (path style): objects, ranges,
conditions, checksums, aws-chunked bodies, multipart uploads, ListObjectsV2. The server answers 501
to unsupported requests, and to requests with unsupported headers that would change the meaning of
the request. Clients sign their requests (signatures.py) with AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY of the server's environment.

handler.py maps requests to the operations of object_operations.py and multipart.py; values.py
parses the values of requests; object_files.py and uploads.py are the storage.
"""

import argparse
import mmap
import os
import socket
import threading
from pathlib import Path

from argolocal.common.processes import end_unless_recorded
from rekindle.local.services.s3.format import BLOCK_BYTES
from rekindle.local.services.s3.handler import RequestHandler
from rekindle.local.services.s3.object_files import ObjectFiles
from rekindle.local.services.s3.values import check_bucket_name
from rekindle.local.services.threaded_server import ConnectionServer


def main() -> None:
    argument_parser = argparse.ArgumentParser(
        prog="python -m rekindle.local.services.s3", description=__doc__
    )
    argument_parser.add_argument(
        "--root", type=Path, required=True, help="directory of the objects"
    )
    argument_parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1 (default: a free port)"
    )
    argument_parser.add_argument(
        "--fd", type=int, help="descriptor of a listening socket to use instead of --port"
    )
    argument_parser.add_argument(
        "--bucket", action="append", default=[], help="bucket to create if it does not exist"
    )
    argument_parser.add_argument(
        "--record", type=Path, help="exit when this JSON file is missing or has another pid"
    )
    arguments = argument_parser.parse_args()

    access_key, secret_key = (
        os.environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
    )
    if not (access_key and secret_key):
        raise SystemExit(
            "AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY is not set: clients must sign with them."
            " Set both."
        )

    if arguments.fd is not None:
        listening_socket = socket.socket(fileno=arguments.fd)
    else:
        listening_socket = socket.create_server(("127.0.0.1", arguments.port))

    listening_socket.listen(4096)
    if arguments.record:
        end_unless_recorded(arguments.record)

    object_files = ObjectFiles(arguments.root.resolve())
    for bucket_name in arguments.bucket:
        check_bucket_name(bucket_name)
        object_files.create(bucket_name)

    print(f"http://127.0.0.1:{listening_socket.getsockname()[1]}", flush=True)
    thread_local = threading.local()

    def answer(connection: socket.socket, request_head: bytes) -> bool:
        if not hasattr(thread_local, "buffer"):
            # use mmap, because memory of mmap is allocated only when it is written to
            thread_local.buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        return not RequestHandler(
            connection, request_head, (access_key, secret_key), thread_local.buffer, object_files
        ).close_connection

    ConnectionServer(listening_socket, answer).serve_forever()


if __name__ == "__main__":
    main()
