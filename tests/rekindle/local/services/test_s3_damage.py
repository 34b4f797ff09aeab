"""Tests of damaged files and unexpected errors of the embedded S3 endpoint."""

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from rekindle.local.services.s3.format import BLOCK_BYTES, make_file_name
from rekindle.local.services.s3.object_files import ObjectFiles
from rekindle.local.services.s3.request import S3Request
from rekindle.local.services.stored_files import StoredFiles
from tests.rekindle.local.services.endpoint import KEY, SECRET, Endpoint

DAMAGES: dict[str, Callable[[str], str]] = {
    "infinite time": lambda text: text.replace('"modified": 1796050119.5', '"modified": 1e50119'),
    "NaN": lambda text: text.replace("1796050119.5", "NaN"),
    "far future": lambda text: text.replace("1796050119.5", "1796050119000.5"),
    "before 1970": lambda text: text.replace("1796050119.5", "-1796050119.5"),
    "time as truth value": lambda text: text.replace("1796050119.5", "true"),
    "header that is a number": lambda text: text.replace('"x/y"', "123"),
    "header with a line break": lambda text: text.replace("x/y", "x\\r\\ny"),
    "header that HTTP cannot send": lambda text: text.replace("x/y", "\\u0100"),
    "header without a name": lambda text: text.replace("content-type", ""),
    "negative size": lambda text: text.replace('"size": 2', '"size": -2'),
    "size as text": lambda text: text.replace('"size": 2', '"size": "2"'),
    "key of another object": lambda text: text.replace('"key": "', '"key": "x'),
    "half a character": lambda text: text.replace('"key": "', '"key": "\\ud800'),
    "repeated field": lambda text: text.replace("{", '{"modified": 1, ', 1),
    "endless nesting": lambda text: text.replace('"x/y"', "[" * 3000),
}


def rewrite_metadata(path: Path, edit: Callable[[str], str]) -> None:
    """Edit the metadata at the end of an object's file."""
    content = path.read_bytes()
    length = int.from_bytes(content[-4:], "big")
    fields = json.loads(content[-4 - length : -4])
    text = json.dumps({**fields, "modified": 1796050119.5})
    new_text = edit(text)
    assert new_text != text
    new_bytes = new_text.encode()
    path.write_bytes(content[: -4 - length] + new_bytes + len(new_bytes).to_bytes(4, "big"))


def status_of(call: Callable[[], object]) -> int:
    with pytest.raises(ClientError) as caught:
        call()
    return caught.value.response["ResponseMetadata"]["HTTPStatusCode"]


def list_keys(server: Endpoint) -> list[str]:
    listing = server.client.list_objects_v2(Bucket="data")
    return [item["Key"] for item in listing.get("Contents", [])]


def test_damaged_objects_are_absent_and_all_others_are_served(tmp_path: Path) -> None:
    server = Endpoint(tmp_path)
    names = [f"damaged/{name}" for name in DAMAGES]
    for name in ("good", *names):
        server.client.put_object(Bucket="data", Key=name, Body=b"12", ContentType="x/y")

    for name, edit in DAMAGES.items():
        rewrite_metadata(tmp_path / "buckets/data" / make_file_name(f"damaged/{name}"), edit)
    for key in names:
        assert status_of(lambda key=key: server.client.head_object(Bucket="data", Key=key)) == 404
    server.kill()

    server.start()
    assert list_keys(server) == ["good"]
    assert server.client.get_object(Bucket="data", Key="good")["Body"].read() == b"12"
    for key in names:
        assert status_of(lambda key=key: server.client.get_object(Bucket="data", Key=key)) == 404
    server.client.put_object(Bucket="data", Key=names[0], Body=b"again")
    assert list_keys(server) == [names[0], "good"]
    assert [item.key for item in StoredFiles(tmp_path, "data").list("")] == [names[0], "good"]
    server.kill()


def test_a_damaged_upload_or_part_is_absent_and_all_others_are_listed(tmp_path: Path) -> None:
    server = Endpoint(tmp_path)
    uploads = [
        server.client.create_multipart_upload(Bucket="data", Key=name)["UploadId"]
        for name in ("a", "b", "c")
    ]
    target = {"Bucket": "data", "Key": "a", "UploadId": uploads[0]}
    for number in (1, 2):
        server.client.upload_part(**target, PartNumber=number, Body=b"12")

    rewrite_metadata(
        tmp_path / f"uploads/{uploads[0]}/00002",
        lambda text: text.replace("1796050119.5", "1796050119e5"),
    )
    for upload, damage in (
        (uploads[1], {"started": 1e300}),
        (uploads[2], {"headers": {"a": "\n"}}),
    ):
        record = tmp_path / "uploads" / upload / "upload.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), **damage}))

    listing = server.client.list_multipart_uploads(Bucket="data")
    assert [upload["Key"] for upload in listing["Uploads"]] == ["a"]
    parts = server.client.list_parts(**target)["Parts"]
    assert [part["PartNumber"] for part in parts] == [1]
    missing = {**target, "Key": "b", "UploadId": uploads[1]}
    assert status_of(lambda: server.client.list_parts(**missing)) == 404
    server.kill()


class UnfinishedAnswer(S3Request):
    """A request whose handler fails after it has sent the beginning of the answer."""

    def act(self) -> None:
        self.answer(200, content_length=10)
        raise KeyError("the rest")


@pytest.fixture
def object_files(tmp_path: Path) -> Iterator[ObjectFiles]:
    files = ObjectFiles(tmp_path)
    yield files
    files.lock_file.close()


def send_request(request_type: type[S3Request], files: ObjectFiles) -> http.client.HTTPResponse:
    """Answer GET /data/a with an object of the type `request_type`, and return the answer."""
    signer = S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1")
    request = AWSRequest("GET", "http://127.0.0.1/data/a", headers={"Host": "127.0.0.1"})
    signer.add_auth(request)
    lines = [f"{name}: {value}\r\n" for name, value in request.headers.items()]
    head = f"GET /data/a HTTP/1.1\r\n{''.join(lines)}\r\n".encode()

    client, connection = socket.socketpair()
    with client:
        with connection:
            buffer = memoryview(bytearray(BLOCK_BYTES))
            handled = request_type(connection, head, (KEY, SECRET), buffer, files)
            is_closed = handled.close_connection
        response = http.client.HTTPResponse(client)
        response.begin()
        if request_type is UnfinishedAnswer:
            assert is_closed
        return response


def test_an_unexpected_error_is_answered_as_an_internal_error(object_files: ObjectFiles) -> None:
    # this handler is the base class, which has no operations
    response = send_request(S3Request, object_files)
    assert response.status == 500
    assert b"<Code>InternalError</Code>" in response.read()


def test_an_error_within_an_answer_does_not_become_a_part_of_the_object(
    object_files: ObjectFiles,
) -> None:
    response = send_request(UnfinishedAnswer, object_files)
    assert response.status == 200
    with pytest.raises(http.client.IncompleteRead):
        response.read()
