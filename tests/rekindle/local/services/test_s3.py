"""Tests of the embedded S3 endpoint through boto3, as a real process."""

import base64
import hashlib
import http.client
import os
import resource
import subprocess
import sys
import threading
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.local.services.s3.checksums import HASH_TYPES
from rekindle.local.services.s3.format import ClientMetadata, ObjectMetadata
from rekindle.local.services.s3.object_files import START_POSITION, ObjectFiles
from tests.rekindle.local.services.endpoint import KEY, SECRET, Endpoint
from tests.waiting import until


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    server = Endpoint(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


def error_of(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        call()
    return (
        caught.value.response["ResponseMetadata"]["HTTPStatusCode"],
        caught.value.response["Error"]["Code"],
    )


def list_keys(client: Any, **query: Any) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="data", **query)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def test_an_object_is_read_as_it_was_written(endpoint: Endpoint) -> None:
    body = os.urandom(3 << 20)
    put = endpoint.client.put_object(
        Bucket="data", Key="a", Body=body, ContentType="x/y", Metadata={"who": "me"}
    )
    got = endpoint.client.get_object(Bucket="data", Key="a")
    assert got["Body"].read() == body
    assert put["ETag"] == got["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'

    assert got["ContentType"] == "x/y"
    assert got["Metadata"] == {"who": "me"}
    assert got["ContentLength"] == len(body)

    assert error_of(lambda: endpoint.client.get_object(Bucket="data", Key="none")) == (
        404,
        "NoSuchKey",
    )
    assert error_of(lambda: endpoint.client.get_object(Bucket="nobucket", Key="a")) == (
        404,
        "NoSuchBucket",
    )
    assert error_of(lambda: endpoint.client.head_object(Bucket="data", Key="none"))[0] == 404


def test_a_range_returns_the_requested_bytes(endpoint: Endpoint) -> None:
    endpoint.client.put_object(Bucket="data", Key="digits", Body=b"0123456789")
    for header, expected in {
        "bytes=2-4": b"234",
        "bytes=7-": b"789",
        "bytes=-3": b"789",
        "bytes=5-99": b"56789",
    }.items():
        got = endpoint.client.get_object(Bucket="data", Key="digits", Range=header)
        assert got["Body"].read() == expected, header
        assert got["ContentRange"].endswith("/10")

    error = error_of(
        lambda: endpoint.client.get_object(Bucket="data", Key="digits", Range="bytes=10-12")
    )
    assert error == (416, "InvalidRange")


def test_exactly_one_of_concurrent_creators_succeeds(endpoint: Endpoint) -> None:
    client = endpoint.client

    def create(racer: int, key: str) -> int:
        try:
            client.put_object(
                Bucket="data", Key=key, Body=str(racer).encode() * 100_000, IfNoneMatch="*"
            )
            return 1
        except ClientError as error:
            assert error.response["Error"]["Code"] == "PreconditionFailed"
            return 0

    for round in range(5):
        with ThreadPoolExecutor(8) as pool:
            assert (
                sum(pool.map(lambda racer, key=f"race{round}": create(racer, key), range(8))) == 1
            )


def test_a_stale_etag_overwrites_nothing(endpoint: Endpoint) -> None:
    client = endpoint.client
    first_etag = client.put_object(Bucket="data", Key="latest", Body=b"1")["ETag"]

    def replace(racer: int) -> int:
        try:
            client.put_object(
                Bucket="data", Key="latest", Body=b"by %d" % racer, IfMatch=first_etag
            )
            return 1
        except ClientError as error:
            assert error.response["Error"]["Code"] == "PreconditionFailed"
            return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(replace, range(8))) == 1

    gone = error_of(
        lambda: client.put_object(Bucket="data", Key="absent", Body=b"", IfMatch=first_etag)
    )
    assert gone == (404, "NoSuchKey")
    stale = error_of(lambda: client.get_object(Bucket="data", Key="latest", IfMatch=first_etag))
    assert stale[0] == 412
    current = client.head_object(Bucket="data", Key="latest")["ETag"]
    assert (
        error_of(lambda: client.get_object(Bucket="data", Key="latest", IfNoneMatch=current))[0]
        == 304
    )
    assert client.get_object(Bucket="data", Key="latest")["Body"].read().startswith(b"by"), (
        "the connection still works"
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["crc32", "sha1", "sha256", "md5"])
def test_a_body_with_a_wrong_checksum_does_not_replace_the_object(
    endpoint: Endpoint, name: str
) -> None:
    field = "ContentMD5" if name == "md5" else f"Checksum{name.upper()}"
    value = hashlib.md5() if name == "md5" else HASH_TYPES[name]()
    value.update(b"good")
    claim = {field: base64.b64encode(value.digest()).decode()}
    client = endpoint.connect(request_checksum_calculation="when_required")
    client.put_object(Bucket="data", Key=name, Body=b"good", **claim)
    assert error_of(lambda: client.put_object(Bucket="data", Key=name, Body=b"gooe", **claim)) == (
        400,
        "BadDigest",
    )
    assert client.get_object(Bucket="data", Key=name)["Body"].read() == b"good"


def test_chunked_bodies_with_trailing_checksums_are_decoded_and_verified(
    endpoint: Endpoint,
) -> None:
    def put(body: bytes, checksum: bytes) -> int:
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (body[:70], body[70:]))
        data = chunks + b"0\r\nx-amz-checksum-crc32:" + base64.b64encode(checksum) + b"\r\n\r\n"
        headers = {
            "x-amz-trailer": "x-amz-checksum-crc32",
            "Content-Encoding": "aws-chunked",
            "x-amz-decoded-content-length": str(len(body)),
            "Content-Length": str(len(data)),
        }
        payload = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
        return endpoint.send(
            "PUT", "/data/chunked", endpoint.signed("PUT", "/data/chunked", headers, payload), data
        )[0]

    body = os.urandom(200)
    assert put(body, zlib.crc32(body).to_bytes(4, "big")) == 200
    assert put(body, b"\0\0\0\0") == 400
    got = endpoint.client.get_object(Bucket="data", Key="chunked", ChecksumMode="ENABLED")
    assert got["Body"].read() == body
    assert "ContentEncoding" not in got


def test_multipart_uploads_are_atomic(endpoint: Endpoint) -> None:
    client = endpoint.client
    target = {"Bucket": "data", "Key": "big/one"}
    parts = [os.urandom(5 << 20), os.urandom(5 << 20), b"end"]

    def upload() -> dict:
        name = client.create_multipart_upload(**target, Metadata={"m": "1"})["UploadId"]
        tags = [
            {
                "PartNumber": n,
                "ETag": client.upload_part(**target, UploadId=name, PartNumber=n, Body=data)[
                    "ETag"
                ],
            }
            for n, data in enumerate(parts, 1)
        ]
        return {**target, "UploadId": name, "MultipartUpload": {"Parts": tags}}

    first_upload = upload()
    second_upload = upload()
    third_upload = upload()
    assert not list_keys(client, Prefix="big/")
    client.complete_multipart_upload(**first_upload, IfNoneMatch="*")
    got = client.get_object(**target)
    tags = b"".join(hashlib.md5(data).digest() for data in parts)
    assert got["Body"].read() == b"".join(parts)
    assert got["ETag"] == f'"{hashlib.md5(tags).hexdigest()}-3"'
    assert got["Metadata"] == {"m": "1"}
    second_error = error_of(
        lambda: client.complete_multipart_upload(**second_upload, IfNoneMatch="*")
    )
    assert second_error == (412, "PreconditionFailed")
    third_upload["MultipartUpload"]["Parts"][0]["ETag"] = tags[:16].hex()
    third_upload["MultipartUpload"]["Parts"][1]["ETag"] = "0" * 32
    assert error_of(lambda: client.complete_multipart_upload(**third_upload)) == (
        400,
        "InvalidPart",
    )
    client.abort_multipart_upload(**target, UploadId=third_upload["UploadId"])
    assert error_of(lambda: client.complete_multipart_upload(**third_upload)) == (
        404,
        "NoSuchUpload",
    )


def test_keys_with_any_characters_are_different_objects(endpoint: Endpoint) -> None:
    keys = [
        "k/a/b",
        "k/a/b/c",
        "k/a//b",
        "k/../up",
        "k/./dot",
        "k/ü ñ +%2F&<>'\"?#",
        "k/" + "x" * 1000,
        "k/日本/語",
        "k/end/",
        "k/\x01ctl",
    ]
    for key in keys:
        endpoint.client.put_object(Bucket="data", Key=key, Body=key.encode())

    for key in keys:
        assert endpoint.client.get_object(Bucket="data", Key=key)["Body"].read() == key.encode()

    assert list_keys(endpoint.client, Prefix="k/") == sorted(keys, key=str.encode)
    endpoint.client.delete_objects(
        Bucket="data", Delete={"Objects": [{"Key": key} for key in keys[:-1]]}
    )
    assert list_keys(endpoint.client, Prefix="k/") == ["k/\x01ctl"]

    assert error_of(
        lambda: endpoint.client.put_object(Bucket="data", Key="x" * 1025, Body=b"")
    ) == (
        400,
        "KeyTooLongError",
    )


def test_a_listing_is_split_into_pages_and_folders(endpoint: Endpoint) -> None:
    keys = ["l/a", "l/b/1", "l/b/2", "l/b0", "l/c/1/x", "l/d"]
    for key in keys:
        endpoint.client.put_object(Bucket="data", Key=key, Body=b"")

    assert list_keys(endpoint.client, Prefix="l/", PaginationConfig={"PageSize": 2}) == keys
    assert list_keys(endpoint.client, Prefix="l/", StartAfter="l/b/2") == ["l/b0", "l/c/1/x", "l/d"]
    pages = endpoint.client.get_paginator("list_objects_v2").paginate(
        Bucket="data", Prefix="l/", Delimiter="/", PaginationConfig={"PageSize": 1}
    )

    keys = [
        x.get("Key") or x["Prefix"]
        for page in pages
        for x in page.get("Contents", []) + page.get("CommonPrefixes", [])
    ]

    assert keys == ["l/a", "l/b/", "l/b0", "l/c/", "l/d"]


names = st.text("ab/é\0\U0001f525", min_size=1, max_size=6)


def meta_of(key: str) -> ObjectMetadata:
    return {"key": key, "etag": "0" * 32, "headers": {}, "size": 0, "modified": 0.0}


@settings(max_examples=100)
@given(
    keys=st.sets(names, max_size=12),
    prefix=st.text("ab/", max_size=2),
    most=st.integers(1, 5),
    cut=st.booleans(),
)
def test_pages_of_any_size_add_up_to_the_complete_listing(
    keys: set[str], prefix: str, most: int, cut: bool
) -> None:
    files = ObjectFiles.__new__(ObjectFiles)
    ordered = sorted(keys, key=str.encode)
    files.keys, files.index = {"b": ordered}, {"b": {key: meta_of(key) for key in keys}}
    files.lock = threading.Lock()
    listed_keys = []
    common = []
    after = START_POSITION

    for _ in range(len(keys) + 1):
        page = files.page("b", prefix, "/" if cut else "", after, most)
        listed_keys += [meta["key"] for meta in page.entries]
        common += page.common_prefixes
        assert len(page.entries) + len(page.common_prefixes) <= most

        if not page.next_after:
            break

        after = page.next_after
    else:
        raise AssertionError("the listing does not end")

    inside = [key for key in ordered if key.startswith(prefix)]
    folded = [key for key in inside if cut and "/" in key[len(prefix) :]]
    assert listed_keys == [key for key in inside if key not in folded]
    assert common == list(
        dict.fromkeys(prefix + key[len(prefix) :].partition("/")[0] + "/" for key in folded)
    )


def test_a_copy_keeps_bytes_and_metadata(endpoint: Endpoint) -> None:
    endpoint.client.put_object(
        Bucket="data", Key="from ü", Body=b"x" * 3_000_000, Metadata={"a": "b"}
    )
    endpoint.client.copy_object(
        Bucket="data", Key="to", CopySource={"Bucket": "data", "Key": "from ü"}
    )
    got = endpoint.client.get_object(Bucket="data", Key="to")
    assert got["Body"].read() == b"x" * 3_000_000
    assert got["Metadata"] == {"a": "b"}


def test_a_presigned_url_works_for_mlflows_downloads(endpoint: Endpoint) -> None:
    endpoint.client.put_object(Bucket="data", Key="p/q.txt", Body=b"0123456789")
    for version in ("s3", "s3v4"):
        client = endpoint.connect(signature_version=version)
        asked = {"Bucket": "data", "Key": "p/q.txt", "ResponseContentType": "text/x"}

        request = urllib.request.Request(
            client.generate_presigned_url("get_object", asked), headers={"Range": "bytes=2-4"}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 206
            assert answer.read() == b"234"
            assert answer.headers["Content-Type"] == "text/x"


def test_large_metadata_is_refused(endpoint: Endpoint) -> None:
    metadata = {f"m{number}": "x" * 2000 for number in range(9)}
    large = error_of(
        lambda: endpoint.client.put_object(Bucket="data", Key="a", Body=b"", Metadata=metadata)
    )
    assert large == (400, "MetadataTooLarge")


def test_unsupported_requests_are_answered_with_501(endpoint: Endpoint) -> None:
    assert error_of(lambda: endpoint.client.get_bucket_policy(Bucket="data")) == (
        501,
        "NotImplemented",
    )
    crc = {"ChecksumCRC64NVME": "AAAAAAAAAAA="}

    assert error_of(
        lambda: endpoint.client.put_object(Bucket="data", Key="a", Body=b"", **crc)
    ) == (
        501,
        "NotImplemented",
    )

    assert (
        error_of(
            lambda: endpoint.client.put_object_tagging(
                Bucket="data", Key="a", Tagging={"TagSet": []}
            )
        )[0]
        == 501
    )

    assert (
        error_of(lambda: endpoint.client.get_object(Bucket="data", Key="a", VersionId="1"))[0]
        == 501
    )


def test_after_kill_9_objects_are_complete_or_absent(tmp_path: Path) -> None:
    server = Endpoint(tmp_path)
    server.client.put_object(Bucket="data", Key="kept/a", Body=b"safe")
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.putrequest("PUT", "/data/kept/half", skip_host=True)

    for name, value in server.signed(
        "PUT", "/data/kept/half", {"Content-Length": "1000000"}
    ).items():
        connection.putheader(name, value)

    connection.endheaders(b"x" * 500_000)
    until("the first half to arrive", lambda: any((tmp_path / "tmp").iterdir()))
    server.kill()
    torn = tmp_path / "buckets/data" / ("0" * 64)
    torn.write_bytes(b"a power cut left this")
    server.start()
    assert list_keys(server.client) == ["kept/a"]
    assert server.client.get_object(Bucket="data", Key="kept/a")["Body"].read() == b"safe"
    assert not any((tmp_path / "tmp").iterdir())
    command = [sys.executable, "-m", "rekindle.local.services.s3", "--root", str(tmp_path)]
    env = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    second_process = subprocess.run(command, env=env, capture_output=True, text=True)
    assert second_process.returncode == 1
    assert "in use by another S3 endpoint" in second_process.stderr
    server.kill()


def test_unknown_files_and_links_do_not_prevent_a_start(tmp_path: Path) -> None:
    """Unknown files and links in a home appear after a `git pull` into it, or a manual copy."""
    outside = tmp_path / "outside"
    root = tmp_path / "s3"
    files = ObjectFiles(root)
    files.create("data")
    metadata: ClientMetadata = {"key": "a", "etag": "0" * 32, "headers": {}}
    meta = files.commit("data", "a", files.write(iter([b"1"]), lambda _: metadata), lambda _: None)
    files.lock_file.close()
    outside.mkdir()
    (outside / "file").touch()

    for folder in ("tmp", "uploads", "buckets", "buckets/data"):
        (root / folder / "folder").mkdir()
        (root / folder / "link").symlink_to(outside)
        (root / folder / "half").touch()
        os.utime(root / folder / "half", (0, 0))

    reopened_files = ObjectFiles(root)
    assert reopened_files.find("data", "a") == meta
    assert not (root / "tmp/half").exists()
    assert (outside / "file").exists()


def test_a_write_to_a_full_disk_fails_and_keeps_the_old_object(tmp_path: Path) -> None:
    server = Endpoint(tmp_path)
    server.client.put_object(Bucket="data", Key="a", Body=b"old")
    # a file size limit fails a write within the body, like a full disk
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    full = error_of(
        lambda: server.client.put_object(Bucket="data", Key="a", Body=os.urandom(5 << 20))
    )
    assert full == (507, "InsufficientStorage")
    assert server.client.get_object(Bucket="data", Key="a")["Body"].read() == b"old"
    assert not any((tmp_path / "tmp").iterdir())
    server.kill()
