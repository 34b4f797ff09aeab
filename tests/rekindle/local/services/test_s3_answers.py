"""The answers of the embedded S3 endpoint to unusual requests are the same as AWS documents."""

import base64
import hashlib
import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.rekindle.local.services.endpoint import KEY, SECRET, Endpoint

TARGET = {"Bucket": "data", "Key": "target"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    server = Endpoint(tmp_path_factory.mktemp("s3"))
    server.client.put_object(Bucket="data", Key="a", Body=b"0123456789", Metadata={"who": "me"})
    yield server
    server.kill()


def send(
    endpoint: Endpoint, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
) -> tuple[int, str, bytes]:
    """Send a signed request, and return the status, the S3 error code and the body of the answer.
    Escapes in `path` are sent unchanged."""
    path, question_mark, query = path.partition("?")
    if question_mark:
        pairs = [pair.partition("=") for pair in query.split("&")]
        path += "?" + "&".join(f"{name}={quote(value, safe='%')}" for name, _, value in pairs)
    all_headers = {"Content-Length": str(len(body)), **headers}
    status, answer = endpoint.send(method, path, endpoint.signed(method, path, all_headers), body)
    codes = re.findall(rb"<Error><Code>(\w+)</Code>", answer)
    return status, codes[0].decode() if codes else "", answer


def send_signed(
    endpoint: Endpoint, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, str]:
    """Send a signed request, and return the status and the error code. `headers`: names of headers
    with "_" in place of "-"."""
    return send(
        endpoint,
        method,
        path,
        body,
        {name.replace("_", "-"): value for name, value in headers.items()},
    )[:2]


def find_texts(body: bytes, tag: str) -> list[str]:
    return re.findall(rf"<{tag}>([^<]*)</{tag}>", body.decode())


def with_md5(body: bytes) -> dict[str, str]:
    return {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_a_key_that_ends_in_nul_hides_no_other_key(tmp_path: Path, page_size: int) -> None:
    server = Endpoint(tmp_path)
    keys = ["a", "a\0", "a\0\0", "a\0/b", "a/b", "ab", "b\0/c", "b\0/d", "c"]
    for key in keys:
        server.client.put_object(Bucket="data", Key=key, Body=key.encode())

    pages = server.client.get_paginator("list_objects_v2")
    listed_keys = [
        item["Key"]
        for page in pages.paginate(Bucket="data", PaginationConfig={"PageSize": page_size})
        for item in page["Contents"]
    ]

    folders = pages.paginate(Bucket="data", Delimiter="/", PaginationConfig={"PageSize": page_size})

    items = [
        item
        for page in folders
        for item in [*page.get("Contents", []), *page.get("CommonPrefixes", [])]
    ]

    server.kill()
    assert listed_keys == keys
    assert [item.get("Key") or item["Prefix"] for item in items].count("a\0/") == 1

    assert sorted(item.get("Key") or item["Prefix"] for item in items) == [
        "a",
        "a\0",
        "a\0\0",
        "a\0/",
        "a/",
        "ab",
        "b\0/",
        "c",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "%ff",
        "%fe",
        "a%c3",
        "%ed%a0%80",
        "%c0%af",
        "%",
        "%4",
        "%zz",
        "a#b",
        "..",
        "../a",
        "a/../../b",
    ],
)
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD", "DELETE"])
def test_a_key_that_is_not_utf_8_or_leaves_the_bucket_is_an_invalid_uri(
    endpoint: Endpoint, key: str, method: str
) -> None:
    expected = (400, "" if method == "HEAD" else "InvalidURI")
    assert send_signed(endpoint, method, f"/data/{key}") == expected


def test_the_replacement_character_is_a_key_of_its_own(endpoint: Endpoint) -> None:
    assert send_signed(endpoint, "PUT", "/data/%EF%BF%BD", b"x") == (200, "")
    assert send_signed(endpoint, "GET", "/data/%FF") == (400, "InvalidURI")
    assert send_signed(endpoint, "GET", "/data?list-type=2&prefix=%FF") == (400, "InvalidURI")
    assert send_signed(endpoint, "PUT", "/data/b", x_amz_copy_source="/data/%FF") == (
        400,
        "InvalidURI",
    )
    _, _, body = send(endpoint, "GET", "/data?list-type=2&prefix=%EF%BF%BD")
    assert find_texts(body, "Key") == ["\ufffd"]


@pytest.mark.parametrize(
    "target", ["/data/a\x80", "/data/\u00e9", "/data/a?x=\u00ff", "data/a", "http://h/data/a", "*"]
)
def test_a_target_that_is_not_a_path_of_ascii_characters_is_an_invalid_uri(
    endpoint: Endpoint, target: str
) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"InvalidURI" in answer


def test_a_key_of_more_than_1024_bytes_is_too_long_in_every_operation(endpoint: Endpoint) -> None:
    longest = "x" * 1024
    long = "x" * 1025
    multibyte = quote("é" * 513)
    too_long = (400, "KeyTooLongError")
    assert send_signed(endpoint, "PUT", f"/data/{longest}") == (200, "")
    assert send_signed(endpoint, "PUT", "/data/b", x_amz_copy_source=f"/data/{longest}") == (
        200,
        "",
    )

    for key in (long, multibyte):
        assert send_signed(endpoint, "PUT", f"/data/{key}") == too_long
        assert send_signed(endpoint, "PUT", f"/data/{key}", x_amz_copy_source="/data/a") == too_long
        assert send_signed(endpoint, "PUT", "/data/b", x_amz_copy_source=f"/data/{key}") == too_long
        assert send_signed(endpoint, "GET", f"/data/{key}") == too_long
        assert send_signed(endpoint, "DELETE", f"/data/{key}") == too_long
        assert send_signed(endpoint, "POST", f"/data/{key}?uploads") == too_long

    request = (
        f"<Delete><Object><Key>{long}</Key></Object><Object><Key>b</Key></Object></Delete>".encode()
    )
    status, _, body = send(endpoint, "POST", "/data?delete", request, with_md5(request))
    assert status == 200
    assert find_texts(body, "Code") == ["KeyTooLongError"]
    assert body.count(b"<Deleted>") == 1


@pytest.mark.parametrize(
    "source", ["", "/", "data", "data/", "/data", "//a", "data/a%", "/data//../../a"]
)
def test_a_copy_source_without_a_valid_bucket_and_key_is_refused(
    endpoint: Endpoint, source: str
) -> None:
    status, error = send_signed(endpoint, "PUT", "/data/b", x_amz_copy_source=source)
    assert (status, error) in [
        (400, "InvalidArgument"),
        (400, "InvalidURI"),
        (400, "InvalidBucketName"),
    ]


def test_a_copy_heeds_its_conditions_and_directive(endpoint: Endpoint) -> None:
    etag = endpoint.client.head_object(Bucket="data", Key="a")["ETag"]
    source: dict[str, Any] = {"x_amz_copy_source": "/data/a"}
    failed = (412, "PreconditionFailed")
    later = "Fri, 01 Jan 2100 00:00:00 GMT"
    earlier = "Sat, 01 Jan 2000 00:00:00 GMT"
    assert (
        send_signed(endpoint, "PUT", "/data/copy", **source, x_amz_copy_source_if_match='"other"')
        == failed
    )
    assert (
        send_signed(endpoint, "PUT", "/data/copy", **source, x_amz_copy_source_if_none_match=etag)
        == failed
    )
    assert (
        send_signed(
            endpoint, "PUT", "/data/copy", **source, x_amz_copy_source_if_modified_since=later
        )
        == failed
    )
    assert (
        send_signed(
            endpoint, "PUT", "/data/copy", **source, x_amz_copy_source_if_unmodified_since=earlier
        )
        == failed
    )
    assert send_signed(endpoint, "GET", "/data/copy") == (404, "NoSuchKey")
    assert send_signed(
        endpoint, "PUT", "/data/copy", **source, x_amz_copy_source_if_match=etag
    ) == (
        200,
        "",
    )
    assert send_signed(endpoint, "PUT", "/data/copy", **source, x_amz_metadata_directive="X") == (
        400,
        "InvalidArgument",
    )
    assert send_signed(endpoint, "PUT", "/data/a", **source) == (
        400,
        "InvalidRequest",
    ), "to itself, without a change"
    assert send_signed(endpoint, "PUT", "/data/copy", x_amz_copy_source="/data/a?versionId=1") == (
        501,
        "NotImplemented",
    )


@pytest.mark.parametrize(
    "part_number", ["0", "10001", "-1", "+1", "1.0", "", "x", "1_0", "%D9%A1", "1" * 30]
)
def test_a_part_number_outside_of_1_to_10000_is_refused(
    endpoint: Endpoint, part_number: str
) -> None:
    upload = endpoint.client.create_multipart_upload(**TARGET)["UploadId"]
    status, error, body = send(
        endpoint, "PUT", f"/data/target?partNumber={part_number}&uploadId={upload}", b"x"
    )
    assert status == 400
    assert error == "InvalidArgument"
    assert find_texts(body, "Message") == [
        "Part number must be an integer between 1 and 10000, inclusive"
    ]
    parts_document = f"<CompleteMultipartUpload><Part><PartNumber>{unquote(part_number)}</PartNumber><ETag>x</ETag></Part>"
    complete = f"{parts_document}</CompleteMultipartUpload>".encode()
    assert send_signed(endpoint, "POST", f"/data/target?uploadId={upload}", complete) == (
        400,
        "InvalidArgument",
    )
    endpoint.client.abort_multipart_upload(**TARGET, UploadId=upload)


def test_the_parts_1_and_10000_make_an_object(endpoint: Endpoint) -> None:
    client = endpoint.client
    upload = {**TARGET, "UploadId": client.create_multipart_upload(**TARGET)["UploadId"]}
    bodies = {1: b"x" * (5 << 20), 10_000: b"end"}

    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(**upload, PartNumber=number, Body=body)["ETag"],
        }
        for number, body in bodies.items()
    ]

    parts_page = client.list_parts(**upload)
    assert [(part["PartNumber"], part["Size"]) for part in parts_page["Parts"]] == [
        (1, 5 << 20),
        (10_000, 3),
    ]
    first_page = client.list_parts(**upload, MaxParts=1)
    second_page = client.list_parts(**upload, PartNumberMarker=first_page["NextPartNumberMarker"])
    assert first_page["IsTruncated"]
    assert [part["PartNumber"] for part in second_page["Parts"]] == [10_000]
    completed = {"MultipartUpload": {"Parts": parts}}

    with pytest.raises(ClientError, match="x-amz-mp-object-size is 4"):
        client.complete_multipart_upload(**upload, **completed, MpuObjectSize=4)

    client.complete_multipart_upload(**upload, **completed, MpuObjectSize=(5 << 20) + 3)
    assert client.head_object(**TARGET)["ContentLength"] == (5 << 20) + 3


def test_a_part_with_another_checksum_is_refused(endpoint: Endpoint) -> None:
    client = endpoint.client
    upload = {**TARGET, "UploadId": client.create_multipart_upload(**TARGET)["UploadId"]}
    part = client.upload_part(**upload, PartNumber=1, Body=b"x", ChecksumAlgorithm="SHA256")
    digest = base64.b64encode(hashlib.sha256(b"x").digest()).decode()

    def complete(checksum: str) -> None:
        parts = [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumSHA256": checksum}]
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    with pytest.raises(ClientError, match="InvalidPart"):
        complete(base64.b64encode(bytes(32)).decode())
    complete(digest)


def test_an_upload_has_one_name(endpoint: Endpoint) -> None:
    upload = endpoint.client.create_multipart_upload(**TARGET)["UploadId"]
    for name in (
        upload.upper() + "A",
        f"../{upload}",
        f"{upload}%00",
        f"{upload[:16]}-{upload[16:]}",
        "",
        "0" * 32,
    ):
        assert send_signed(endpoint, "PUT", f"/data/target?partNumber=1&uploadId={name}", b"x") == (
            404,
            "NoSuchUpload",
        )
        assert send_signed(endpoint, "DELETE", f"/data/target?uploadId={name}") == (
            404,
            "NoSuchUpload",
        )

    assert send_signed(endpoint, "DELETE", f"/data/other?uploadId={upload}") == (
        404,
        "NoSuchUpload",
    )
    assert send_signed(endpoint, "DELETE", f"/data/target?uploadId={upload}") == (204, "")


def read_presigned(
    endpoint: Endpoint, version: str, query: Mapping[str, str]
) -> tuple[int, Message, bytes]:
    """Read the object `a` through a presigned URL with more parameters, which are signed."""
    client = endpoint.connect(signature_version=version)

    def add(request: object, **_: object) -> None:
        request.url += "".join(f"&{quote(k)}={quote(v)}" for k, v in query.items())  # type: ignore[attr-defined]
        request.url = request.url.replace("&", "?", "?" not in request.url)  # type: ignore[attr-defined]

    client.meta.events.register("before-sign.s3.GetObject", add)
    url = client.generate_presigned_url("get_object", {"Bucket": "data", "Key": "a"})
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_only_the_six_documented_headers_can_be_overridden(
    endpoint: Endpoint, version: str
) -> None:
    names = [
        "content-type",
        "content-language",
        "expires",
        "cache-control",
        "content-disposition",
        "content-encoding",
    ]

    status, headers, body = read_presigned(
        endpoint, version, {f"response-{name}": f"x-{name}" for name in names}
    )
    assert status == 200
    assert body == b"0123456789"
    assert [headers[name] for name in names] == [f"x-{name}" for name in names]

    other_headers = [
        "content-length",
        "set-cookie",
        "etag",
        "last-modified",
        "x\r\nset-cookie",
        "location",
    ]

    status, headers, body = read_presigned(
        endpoint, version, {f"response-{name}": "1" for name in other_headers}
    )
    assert status == 200
    assert body == b"0123456789"
    assert headers["content-length"] == "10"
    assert not {"set-cookie", "location", "x"} & {name.lower() for name in headers}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("version", ["s3", "s3v4"])
@pytest.mark.parametrize(
    "value", ["a\r\nSet-Cookie: b=1", "a\nb", "a\0b", "a\x7fb", "a\x85b", "日本"]
)
def test_a_value_that_is_no_text_of_a_header_cannot_override_one(
    endpoint: Endpoint, version: str, value: str
) -> None:
    status, headers, body = read_presigned(
        endpoint, version, {"response-content-disposition": value}
    )
    assert status == 400
    assert headers["set-cookie"] is None
    assert b"<Code>InvalidArgument</Code>" in body
    ElementTree.fromstring(body)


def test_parameters_that_an_operation_does_not_have_are_not_ignored(endpoint: Endpoint) -> None:
    earlier_etag = endpoint.client.head_object(Bucket="data", Key="a")["ETag"]
    for query in (
        "partNumber=1",
        "versionId=1",
        "tagging",
        "acl",
        "response-content-type=x",
        "prefix=a",
        "x",
    ):
        assert send_signed(endpoint, "PUT", f"/data/a?{query}", b"other") == (501, "NotImplemented")
        assert send_signed(endpoint, "DELETE", f"/data/a?{query}") == (501, "NotImplemented")

    assert send_signed(endpoint, "GET", "/data/a?partNumber=1") == (501, "NotImplemented")
    assert send_signed(endpoint, "GET", "/data/a?response-expires=x&response-expires=y") == (
        400,
        "InvalidArgument",
    )

    for name in (
        "x-amz-tagging",
        "x-amz-write-offset-bytes",
        "x-amz-server-side-encryption-customer-key",
    ):
        assert send(endpoint, "PUT", "/data/a", b"other", {name: "a=b"})[:2] == (
            501,
            "NotImplemented",
        )

    assert endpoint.client.head_object(Bucket="data", Key="a")["ETag"] == earlier_etag


def test_an_abandoned_upload_is_listed_and_can_be_aborted(endpoint: Endpoint) -> None:
    client = endpoint.client
    for upload in client.list_multipart_uploads(Bucket="data").get("Uploads", []):
        client.abort_multipart_upload(Bucket="data", Key=upload["Key"], UploadId=upload["UploadId"])

    keys = ["up/a", "up/a", "up/b\x01", "up/é", "z"]
    names = [client.create_multipart_upload(Bucket="data", Key=key)["UploadId"] for key in keys]
    expected = [("up/a", names[0]), ("up/a", names[1]), ("up/b\x01", names[2]), ("up/é", names[3])]

    for page_size in (1, 2, 1000):
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket="data",
            Prefix="up/",
            EncodingType="url",
            PaginationConfig={"PageSize": page_size},
        )
        listed_uploads = [
            (item["Key"], item["UploadId"]) for page in pages for item in page["Uploads"]
        ]
        assert [(unquote(key), name) for key, name in listed_uploads] == expected

    assert (
        find_texts(send(endpoint, "GET", "/data?uploads&key-marker=up/a")[2], "UploadId")
        == names[2:]
    )
    for key, name in zip(keys, names, strict=True):
        client.abort_multipart_upload(Bucket="data", Key=key, UploadId=name)

    assert "Uploads" not in client.list_multipart_uploads(Bucket="data")
    assert send_signed(endpoint, "GET", "/none-such?uploads") == (404, "NoSuchBucket")


def test_an_abandoned_upload_ends_a_week_after_its_start(tmp_path: Path) -> None:
    server = Endpoint(tmp_path)
    upload = {**TARGET, "UploadId": server.client.create_multipart_upload(**TARGET)["UploadId"]}
    server.client.upload_part(**upload, PartNumber=1, Body=b"x")
    record = tmp_path / "uploads" / upload["UploadId"] / "upload.json"
    started = re.sub(r'"started": [0-9.]+', '"started": 1.0', record.read_text())
    record.write_text(started)
    server.client.upload_part(**upload, PartNumber=2, Body=b"x")
    kept_upload = server.client.create_multipart_upload(**TARGET)["UploadId"]
    assert os.listdir(tmp_path / "uploads") == [kept_upload], "while the server runs"

    with pytest.raises(ClientError, match="NoSuchUpload"):
        server.client.list_parts(**upload)

    (tmp_path / "uploads" / kept_upload / "upload.json").write_text(started)
    server.kill()
    server.start()
    assert os.listdir(tmp_path / "uploads") == [], "at a start"
    server.kill()


def test_conditions_protect_an_object_from_deletion(endpoint: Endpoint) -> None:
    etag = endpoint.client.put_object(Bucket="data", Key="kept", Body=b"1")["ETag"]
    assert send_signed(endpoint, "DELETE", "/data/kept", If_Match='"other"') == (
        412,
        "PreconditionFailed",
    )
    assert send_signed(endpoint, "DELETE", "/data/none", If_Match="*") == (404, "NoSuchKey")

    listed_uploads = [
        ("kept", "<ETag>other</ETag>"),
        ("kept", "<VersionId>1</VersionId>"),
        ("kept", "<Size>3</Size>"),
    ]

    objects = "".join(
        f"<Object><Key>{key}</Key>{condition}</Object>" for key, condition in listed_uploads
    )
    request = f"<Delete>{objects}</Delete>".encode()
    status, _, body = send(endpoint, "POST", "/data?delete", request, with_md5(request))
    assert status == 200
    assert find_texts(body, "Code") == ["PreconditionFailed", "NoSuchVersion", "NotImplemented"]
    assert send_signed(endpoint, "DELETE", "/data/kept", If_Match=etag) == (204, "")
    assert send_signed(endpoint, "GET", "/data/kept") == (404, "NoSuchKey")


DOCUMENT_TYPE = '<!DOCTYPE x [<!ENTITY b "kept">]><Delete><Object><Key>&b;</Key></Object></Delete>'


@pytest.mark.parametrize(
    "request_body",
    [
        DOCUMENT_TYPE.encode(),
        DOCUMENT_TYPE.encode("utf-16"),
        ('<?xml version="1.0" encoding="UTF-16"?>' + DOCUMENT_TYPE).encode("utf-16-le"),
        b"<Delete></Delete>",
        b"<Delete><Object></Object></Delete>",
        b"<Delete><Object><Key></Key></Object></Delete>",
        b"<Delete><Object><Key>kept<b/>x</Key></Object></Delete>",
        b"<Delete><Object><Key>kept</Key><Key>x</Key></Object></Delete>",
        b"<Delete><Object><Key>a&#x1;</Key></Object></Delete>",
        b"<Other><Object><Key>kept</Key></Object></Other>",
        b"<Delete>" + b"<Object><Key>kept</Key></Object>" * 1001 + b"</Delete>",
        b"<a>" * 100_000,
        b"\xff",
        b"",
    ],
)
def test_a_list_of_deletions_that_is_not_exactly_that_deletes_nothing(
    endpoint: Endpoint, request_body: bytes
) -> None:
    endpoint.client.put_object(Bucket="data", Key="kept", Body=b"1")
    answer = send(endpoint, "POST", "/data?delete", request_body, with_md5(request_body))
    assert answer[:2] == (400, "MalformedXML")
    ElementTree.fromstring(answer[2])
    assert send_signed(endpoint, "GET", "/data/kept") == (200, "")


def test_a_list_of_deletions_needs_its_checksum(endpoint: Endpoint) -> None:
    endpoint.client.put_object(Bucket="data", Key="kept", Body=b"1")
    request = b"<Delete><Object><Key>kept</Key></Object></Delete>"
    assert send_signed(endpoint, "POST", "/data?delete", request) == (400, "InvalidRequest")
    assert send(endpoint, "POST", "/data?delete", request, with_md5(b"other"))[:2] == (
        400,
        "BadDigest",
    )
    assert send_signed(endpoint, "POST", "/data?delete", request, Content_MD5="x") == (
        400,
        "InvalidDigest",
    )
    assert send_signed(endpoint, "PUT", "/data/kept", b"2", Content_MD5="x") == (
        400,
        "InvalidDigest",
    )
    assert send_signed(endpoint, "PUT", "/data/kept", b"2", x_amz_checksum_sha256="x") == (
        400,
        "InvalidRequest",
    )
    assert send_signed(endpoint, "GET", "/data/kept") == (200, "")


def test_a_carriage_return_in_a_key_survives_the_answers(endpoint: Endpoint) -> None:
    endpoint.client.put_object(Bucket="data", Key="cr/a\rb\nc", Body=b"")
    _, _, body = send(endpoint, "GET", "/data?list-type=2&prefix=cr/")
    assert ElementTree.fromstring(body).findtext("Contents/Key") == "cr/a\rb\nc"
    request = b"<Delete><Object><Key>cr/a&#13;b&#10;c</Key></Object></Delete>"
    _, _, body = send(endpoint, "POST", "/data?delete", request, with_md5(request))
    assert ElementTree.fromstring(body).findtext("Deleted/Key") == "cr/a\rb\nc"
    assert send_signed(endpoint, "GET", "/data/cr/a%0Db%0Ac") == (404, "NoSuchKey")


def test_a_listing_writes_characters_that_xml_forbids_as_references_or_encodes_keys(
    endpoint: Endpoint,
) -> None:
    for key in ("xml/%00", "xml/%01", "xml/%EF%BF%BF"):
        assert send_signed(endpoint, "PUT", f"/data/{key}") == (200, "")

    _, _, body = send(endpoint, "GET", "/data?list-type=2&prefix=xml/")
    assert find_texts(body, "Key") == ["xml/&#x0;", "xml/&#x1;", "xml/&#xffff;"]
    _, _, body = send(endpoint, "GET", "/data?list-type=2&prefix=xml/&encoding-type=url")
    keys = [element.text for element in ElementTree.fromstring(body).iter("Key")]
    assert keys == ["xml/%00", "xml/%01", "xml/%EF%BF%BF"]
    assert send_signed(endpoint, "GET", "/data?list-type=2&encoding-type=base64") == (
        400,
        "InvalidArgument",
    )
    missing = send(endpoint, "GET", "/data/xml/%02")
    assert missing[:2] == (404, "NoSuchKey")
    ElementTree.fromstring(missing[2])


@pytest.mark.parametrize(
    "query",
    [
        "max-keys=-1",
        "max-keys=x",
        "max-keys=1_0",
        "max-keys=2147483648",
        "max-keys=%D9%A1",
        "max-keys=1.0",
        "continuation-token=x",
        "continuation-token=YQ==",
        "continuation-token=a2E=x",
        "continuation-token=a_%2Bh",
        "prefix=a&prefix=b",
    ],
)
def test_an_invalid_parameter_of_a_listing_is_refused(endpoint: Endpoint, query: str) -> None:
    assert send_signed(endpoint, "GET", f"/data?list-type=2&{query}") == (400, "InvalidArgument")


def test_a_listing_states_how_many_keys_a_page_may_have(endpoint: Endpoint) -> None:
    _, _, body_without_keys = send(endpoint, "GET", "/data?list-type=2&max-keys=0")
    assert find_texts(body_without_keys, "MaxKeys") == ["0"]
    assert find_texts(body_without_keys, "IsTruncated") == ["false"]
    assert find_texts(body_without_keys, "Key") == []
    _, _, many = send(endpoint, "GET", "/data?list-type=2&max-keys=5000&start-after=a%20b")
    assert find_texts(many, "MaxKeys") == ["1000"]
    assert find_texts(many, "StartAfter") == ["a b"]
    assert send_signed(endpoint, "GET", "/data?list-type=1") == (400, "InvalidArgument")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0-0", b"0"), ("9-", b"9"), ("-99", b"0123456789"), ("1-99999999999999999", b"123456789")],
)
def test_a_range_may_end_after_the_object(endpoint: Endpoint, value: str, expected: bytes) -> None:
    status, _, body = send(endpoint, "GET", "/data/a", headers={"Range": f"bytes={value}"})
    assert status == 206
    assert body == expected


@pytest.mark.parametrize(
    "value",
    [
        "bytes=5-2",
        "bytes=0-1,3-4",
        "bytes=x",
        "bytes=-",
        "octets=0-1",
        "bytes= 0-1",
        f"bytes={'9' * 5000}-",
    ],
)
def test_an_invalid_range_is_ignored(endpoint: Endpoint, value: str) -> None:
    status, _, body = send(endpoint, "GET", "/data/a", headers={"Range": value})
    assert status == 200
    assert body == b"0123456789"


@pytest.mark.parametrize("value", ["bytes=10-", "bytes=-0", "bytes=99-100"])
def test_a_range_outside_of_the_object_is_refused(endpoint: Endpoint, value: str) -> None:
    assert send_signed(endpoint, "GET", "/data/a", Range=value) == (416, "InvalidRange")


def test_conditions_on_reading_are_those_of_http(endpoint: Endpoint) -> None:
    head = endpoint.client.head_object(Bucket="data", Key="a")
    etag = head["ETag"]
    date = head["ResponseMetadata"]["HTTPHeaders"]["last-modified"]
    later = "Fri, 01 Jan 2100 00:00:00 GMT"
    earlier = "Sat, 01 Jan 2000 00:00:00 GMT"

    answers = [
        (304, {"If-Modified-Since": date}),
        (304, {"If-Modified-Since": later}),
        (200, {"If-Modified-Since": earlier}),
        (412, {"If-Unmodified-Since": earlier}),
        (200, {"If-Unmodified-Since": date}),
        (200, {"If-Match": etag, "If-Unmodified-Since": earlier}),
        (304, {"If-None-Match": etag, "If-Modified-Since": earlier}),
        (200, {"If-None-Match": '"x"', "If-Modified-Since": later}),
        (200, {"If-Match": f'"x", {etag}'}),
        (304, {"If-None-Match": f"W/{etag}"}),
        (304, {"If-None-Match": "*"}),
        (200, {"If-Modified-Since": "yesterday"}),
        (200, {"If-Unmodified-Since": ""}),
        (206, {"Range": "bytes=0-1", "If-Range": etag}),
        (206, {"Range": "bytes=0-1", "If-Range": date}),
        (200, {"Range": "bytes=0-1", "If-Range": '"x"'}),
    ]

    assert [
        (send(endpoint, "GET", "/data/a", headers=headers)[0], headers) for _, headers in answers
    ] == answers
    assert send_signed(endpoint, "PUT", "/data/a", b"x", If_None_Match=etag) == (
        501,
        "NotImplemented",
    )


def put_chunks(endpoint: Endpoint, body: bytes, **changes: str) -> tuple[int, str]:
    headers = {
        "x-amz-trailer": "x-amz-checksum-sha256",
        "Content-Encoding": "aws-chunked,gzip",
        "x-amz-decoded-content-length": "3",
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    signed = endpoint.signed("PUT", "/data/chunks", headers, "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
    status, answer = endpoint.send(
        "PUT", "/data/chunks", {k: v for k, v in signed.items() if v}, body
    )
    return status, "".join(find_texts(answer, "Code"))


def test_a_chunked_body_that_is_not_exactly_as_declared_is_refused(endpoint: Endpoint) -> None:
    trailer = (
        b"x-amz-checksum-sha256:" + base64.b64encode(hashlib.sha256(b"abc").digest()) + b"\r\n"
    )
    valid_body = b"3\r\nabc\r\n0\r\n" + trailer + b"\r\n"
    md5 = b"content-md5:" + base64.b64encode(hashlib.md5(b"abc").digest()) + b"\r\n"
    assert put_chunks(endpoint, valid_body) == (200, "")
    assert endpoint.client.head_object(Bucket="data", Key="chunks")["ContentEncoding"] == "gzip"
    incomplete = (400, "IncompleteBody")
    malformed = (400, "MalformedTrailerError")
    assert put_chunks(endpoint, valid_body.replace(b"abc", b"abcXYZ")) == incomplete
    assert put_chunks(endpoint, valid_body + b"more") == incomplete
    assert put_chunks(endpoint, valid_body[:-2] + trailer + b"\r\n") == malformed
    assert put_chunks(endpoint, valid_body[:-2] + md5 + b"\r\n") == malformed
    assert (
        put_chunks(endpoint, valid_body[:-2] + b"x-amz-decoded-content-length:3\r\n\r\n")
        == malformed
    )
    assert put_chunks(endpoint, valid_body, x_amz_decoded_content_length="4") == incomplete
    assert put_chunks(endpoint, valid_body, x_amz_decoded_content_length="+3") == (
        400,
        "InvalidArgument",
    )
    assert put_chunks(endpoint, valid_body, x_amz_decoded_content_length="") == (
        411,
        "MissingContentLength",
    )


def test_a_write_without_a_length_writes_nothing(endpoint: Endpoint) -> None:
    headers = endpoint.signed("PUT", "/data/a", {})
    status, body = endpoint.send("PUT", "/data/a", headers)
    assert status == 411
    assert find_texts(body, "Code") == ["MissingContentLength"]
    assert send_signed(endpoint, "GET", "/data/a") == (200, "")


@pytest.mark.parametrize("payload", ["", "x", "0" * 63, "UNSIGNED", "0" * 65])
def test_a_request_states_the_sha256_of_its_body_or_that_it_is_unsigned(
    endpoint: Endpoint, payload: str
) -> None:
    headers = endpoint.signed(
        "PUT", "/data/b", {"Content-Length": "1", "x-amz-content-sha256": payload}, payload
    )
    status, body = endpoint.send("PUT", "/data/b", headers, b"x")
    assert status == 400
    assert find_texts(body, "Code") == ["InvalidArgument"]


def test_metadata_has_at_most_2_kb(endpoint: Endpoint) -> None:
    assert send_signed(endpoint, "PUT", "/data/meta", x_amz_meta_a="x" * 2047) == (200, "")
    assert send_signed(endpoint, "PUT", "/data/meta", x_amz_meta_a="x" * 2048) == (
        400,
        "MetadataTooLarge",
    )
    assert send_signed(endpoint, "POST", "/data/meta?uploads", x_amz_meta_a="x" * 2048) == (
        400,
        "MetadataTooLarge",
    )


@pytest.mark.parametrize(
    "name",
    [
        "ab",
        "A-bucket",
        "a..b",
        "a_b",
        "192.168.5.4",
        "xn--a",
        "a-s3alias",
        "-ab",
        "ab-",
        "x" * 64,
        "a%2Fb",
        "a%00b",
        "é",
    ],
)
def test_a_name_that_s3_does_not_allow_is_no_bucket(endpoint: Endpoint, name: str) -> None:
    assert send_signed(endpoint, "PUT", f"/{quote(name, safe='%')}") == (400, "InvalidBucketName")
    assert send_signed(endpoint, "GET", f"/{quote(name, safe='%')}/a") == (400, "InvalidBucketName")


@pytest.mark.parametrize("encoding", ["unknown", "rot13", "utf-7", "idna"])
def test_a_body_in_an_unknown_encoding_is_not_xml(endpoint: Endpoint, encoding: str) -> None:
    body = f'<?xml version="1.0" encoding="{encoding}"?><Delete><Object><Key>k</Key></Object></Delete>'.encode()
    assert send(endpoint, "POST", "/data?delete", body, with_md5(body))[:2] == (400, "MalformedXML")


@pytest.mark.parametrize(
    ("header", "supported", "refused"),
    [
        ("x-amz-acl", "bucket-owner-full-control", "public-read"),
        ("x-amz-server-side-encryption", "AES256", "aws:kms"),
        ("x-amz-storage-class", "STANDARD", "GLACIER"),
    ],
)
def test_a_header_with_a_value_that_the_server_cannot_act_on_is_refused(
    endpoint: Endpoint, header: str, supported: str, refused: str
) -> None:
    assert send(endpoint, "PUT", "/data/kept", b"x", {header: supported})[:2] == (200, "")
    assert send(endpoint, "PUT", "/data/kept", b"x", {header: refused})[:2] == (
        501,
        "NotImplemented",
    )


def test_a_request_has_one_checksum_and_the_checksum_that_it_announces(endpoint: Endpoint) -> None:
    sha256 = base64.b64encode(hashlib.sha256(b"x").digest()).decode()
    sha1 = base64.b64encode(hashlib.sha1(b"x").digest()).decode()
    two_checksums = {"x-amz-checksum-sha256": sha256, "x-amz-checksum-sha1": sha1}
    assert send(endpoint, "PUT", "/data/checked", b"x", two_checksums)[:2] == (
        400,
        "InvalidRequest",
    )
    announced = {"x-amz-sdk-checksum-algorithm": "SHA256"}
    assert send(endpoint, "PUT", "/data/checked", b"x", announced)[:2] == (400, "InvalidRequest")
    assert (
        send(endpoint, "PUT", "/data/checked", b"x", announced | {"x-amz-checksum-sha256": sha256})[
            0
        ]
        == 200
    )


def test_a_copy_has_the_checksum_that_its_request_asks_for(endpoint: Endpoint) -> None:
    endpoint.client.put_object(Bucket="data", Key="plain", Body=b"x", ChecksumAlgorithm="CRC32")
    endpoint.client.copy_object(**TARGET, CopySource="data/plain", ChecksumAlgorithm="SHA256")
    stored_object = endpoint.client.head_object(**TARGET, ChecksumMode="ENABLED")
    assert (
        stored_object["ChecksumSHA256"] == base64.b64encode(hashlib.sha256(b"x").digest()).decode()
    )
    assert "ChecksumCRC32" not in stored_object
    refused = {"x-amz-copy-source": "data/plain", "x-amz-checksum-algorithm": "CRC32C"}
    assert send(endpoint, "PUT", "/data/target", b"", refused)[:2] == (501, "NotImplemented")


def upload_in_parts(endpoint: Endpoint, key: str, parts: list[bytes]) -> str:
    """Write an object in parts, and return the ETag of the object."""
    client = endpoint.client
    target = {"Bucket": "data", "Key": key}
    upload = {**target, "UploadId": client.create_multipart_upload(**target)["UploadId"]}
    done = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(**upload, PartNumber=number, Body=body)["ETag"],
        }
        for number, body in enumerate(parts, 1)
    ]
    return client.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})["ETag"]


def test_a_copy_of_an_object_in_parts_has_the_etag_of_an_object_without_parts(
    endpoint: Endpoint,
) -> None:
    etag = upload_in_parts(endpoint, "parts", [b"x"])
    md5 = f'"{hashlib.md5(b"x").hexdigest()}"'
    assert etag.endswith('-1"')

    copy = {**TARGET, "CopySource": "data/parts"}
    with pytest.raises(ClientError, match="PreconditionFailed"):
        endpoint.client.copy_object(**copy, CopySourceIfMatch=md5)
    answer = endpoint.client.copy_object(**copy, CopySourceIfMatch=etag, ChecksumAlgorithm="SHA256")
    assert answer["CopyObjectResult"]["ETag"] == md5
    assert endpoint.client.head_object(**TARGET)["ETag"] == md5


def test_a_large_object_is_copied_in_parts(endpoint: Endpoint) -> None:
    data = os.urandom(11 << 20)
    endpoint.client.put_object(Bucket="data", Key="large", Body=data)
    parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    endpoint.client.copy({"Bucket": "data", "Key": "large"}, "data", "target", Config=parts)
    answer = endpoint.client.get_object(**TARGET)
    assert answer["Body"].read() == data
    assert answer["ETag"].endswith('-3"')


@pytest.mark.parametrize(
    ("headers", "status", "error"),
    [
        ({"x-amz-copy-source-range": "bytes=2-4"}, 200, ""),
        ({"x-amz-copy-source-range": "bytes=9-9"}, 200, ""),
        ({"x-amz-copy-source-range": "bytes=9-10"}, 400, "InvalidArgument"),
        ({"x-amz-copy-source-range": "bytes=4-2"}, 400, "InvalidArgument"),
        ({"x-amz-copy-source-range": "bytes=2-"}, 400, "InvalidArgument"),
        ({"x-amz-copy-source-range": "bytes=-2"}, 400, "InvalidArgument"),
        ({"x-amz-copy-source-range": "2-4"}, 400, "InvalidArgument"),
        ({"x-amz-copy-source-if-match": "other"}, 412, "PreconditionFailed"),
        ({"x-amz-metadata-directive": "REPLACE"}, 501, "NotImplemented"),
        ({"x-amz-copy-source": "/data/nothing"}, 404, "NoSuchKey"),
    ],
)
def test_a_part_is_copied_from_exactly_the_bytes_of_the_range(
    endpoint: Endpoint, headers: dict[str, str], status: int, error: str
) -> None:
    upload_id = endpoint.client.create_multipart_upload(Bucket="data", Key="parts")["UploadId"]
    path = f"/data/parts?uploadId={upload_id}&partNumber=1"
    all_headers = {"x-amz-copy-source": "/data/a", **headers}
    assert send(endpoint, "PUT", path, b"", all_headers)[:2] == (status, error)

    first, _, last = (
        headers.get("x-amz-copy-source-range", "").removeprefix("bytes=").partition("-")
    )
    expected = (
        [f'"{hashlib.md5(b"0123456789"[int(first) : int(last) + 1]).hexdigest()}"']
        if status == 200
        else []
    )
    parts_page = endpoint.client.list_parts(Bucket="data", Key="parts", UploadId=upload_id)
    assert [part["ETag"] for part in parts_page.get("Parts", [])] == expected


@pytest.mark.parametrize("directive", ["COPY", "REPLACE"])
def test_a_copy_keeps_the_checksum_of_its_source(endpoint: Endpoint, directive: str) -> None:
    written = endpoint.client.put_object(
        Bucket="data", Key="checked", Body=b"x", ChecksumAlgorithm="SHA256"
    )
    answer = endpoint.client.copy_object(
        **TARGET, CopySource="data/checked", MetadataDirective=directive
    )
    stored_object = endpoint.client.head_object(**TARGET, ChecksumMode="ENABLED")
    checksum = base64.b64encode(hashlib.sha256(b"x").digest()).decode()
    assert written["ChecksumSHA256"] == checksum
    assert answer["CopyObjectResult"]["ChecksumSHA256"] == checksum
    assert stored_object["ChecksumSHA256"] == checksum


def test_a_source_of_more_than_5_gib_is_not_copied_at_once(tmp_path: Path) -> None:
    size = (5 << 30) + 1
    meta = {"key": "large", "etag": "0" * 32, "headers": {}, "size": size, "modified": 1.0}
    tail = json.dumps(meta).encode()
    file = tmp_path / "buckets/data" / hashlib.sha256(b"large").hexdigest()
    file.parent.mkdir(parents=True)
    with file.open("wb") as target:
        target.seek(size)
        target.write(tail + len(tail).to_bytes(4, "big"))

    server = Endpoint(tmp_path)
    try:
        assert send_signed(server, "PUT", "/data/copy", x_amz_copy_source="/data/large") == (
            400,
            "InvalidRequest",
        )
    finally:
        server.kill()


@pytest.mark.parametrize(
    "header",
    [
        "x-amz-copy-source-range",
        "x-amz-copy-source-server-side-encryption-customer-key",
        "x-amz-checksum-sha256",
        "x-amz-object-lock-mode",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-bucket-key-enabled",
        "x-amz-tagging-directive",
        "x-amz-unknown",
    ],
)
def test_a_copy_ignores_no_header(endpoint: Endpoint, header: str) -> None:
    headers = {"x-amz-copy-source": "/data/a", header: "bytes=0-1"}
    assert send(endpoint, "PUT", "/data/ignored", b"", headers)[:2] == (501, "NotImplemented")
    assert send_signed(endpoint, "HEAD", "/data/ignored")[0] == 404


@pytest.mark.parametrize(
    "header",
    [
        "content-range",
        "x-amz-copy-source-if-match",
        "x-amz-metadata-directive",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-context",
        "x-amz-unknown",
    ],
)
def test_a_write_ignores_no_header(endpoint: Endpoint, header: str) -> None:
    answer = send(endpoint, "PUT", "/data/ignored", b"x", {header: "bytes 0-0/2"})
    assert answer[:2] == (501, "NotImplemented")
    assert send_signed(endpoint, "HEAD", "/data/ignored")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "condition"),
    [
        ("PUT", "/data/a", "If_Unmodified_Since"),
        ("PUT", "/data/a", "If_Modified_Since"),
        ("PUT", "/data/a", "If_Range"),
        ("PUT", "/data/a?uploadId=x&partNumber=1", "If_Match"),
        ("DELETE", "/data/a", "If_Unmodified_Since"),
        ("DELETE", "/data/a?uploadId=x", "If_Match"),
        ("POST", "/data/a?uploads", "If_None_Match"),
        ("POST", "/data?delete", "If_Match"),
    ],
)
def test_a_change_ignores_no_condition(
    endpoint: Endpoint, method: str, path: str, condition: str
) -> None:
    value = "Sat, 01 Jan 2000 00:00:00 GMT" if condition.endswith("Since") else "*"
    assert send_signed(endpoint, method, path, b"", **{condition: value}) == (501, "NotImplemented")
    assert endpoint.client.get_object(Bucket="data", Key="a")["Body"].read() == b"0123456789"


def test_only_a_write_of_an_object_copies(endpoint: Endpoint) -> None:
    for method, path in (("GET", "/data/a"), ("POST", "/data/b?uploads"), ("DELETE", "/data/b")):
        assert send_signed(endpoint, method, path, x_amz_copy_source="/data/a")[0] == 501


@pytest.mark.parametrize(
    "date",
    [
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 2020 99999999999999999999:00:00 GMT",
        "Mon, 01 Jan 2020 00:00:00 +99999999999999999999",
    ],
)
def test_a_date_that_no_calendar_has_is_ignored(endpoint: Endpoint, date: str) -> None:
    assert send_signed(endpoint, "GET", "/data/a", If_Modified_Since=date) == (200, "")
    condition = {"x_amz_copy_source_if_unmodified_since": date}
    answer = send_signed(
        endpoint, "PUT", "/data/dated", b"", x_amz_copy_source="/data/a", **condition
    )
    assert answer == (200, "")


def test_an_empty_condition_protects_an_object(endpoint: Endpoint) -> None:
    endpoint.client.put_object(Bucket="data", Key="kept", Body=b"old")
    assert send_signed(endpoint, "PUT", "/data/kept", b"new", If_Match="")[0] == 412
    assert send_signed(endpoint, "DELETE", "/data/kept", If_Match="")[0] == 412
    body = b"<Delete><Object><Key>kept</Key><ETag></ETag></Object></Delete>"
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
    assert (
        b"<Code>PreconditionFailed"
        in send(endpoint, "POST", "/data?delete", body, {"Content-MD5": md5})[2]
    )
    assert endpoint.client.get_object(Bucket="data", Key="kept")["Body"].read() == b"old"


@pytest.mark.parametrize(
    "host",
    [
        "data.localhost",
        "other.localhost",
        "data.s3.example.com",
        "my.bucket.localhost",
        "my.bucket.s3.example.com",
        "Data.LOCALHOST.",
    ],
)
def test_a_bucket_in_the_host_creates_no_bucket(endpoint: Endpoint, host: str) -> None:
    endpoint.client.create_bucket(Bucket="my.bucket")
    signer = S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1")
    request = AWSRequest("PUT", f"http://{host}/object", headers={"Host": host})
    signer.add_auth(request)
    status, answer = endpoint.send("PUT", "/object", dict(request.headers.items()))
    assert status == 501
    assert b"use the path style" in answer
    assert send_signed(endpoint, "HEAD", "/object")[0] == 404


def test_a_body_that_is_no_configuration_creates_no_bucket(endpoint: Endpoint) -> None:
    assert send_signed(endpoint, "PUT", "/new-bucket", b"content of an object") == (
        400,
        "MalformedXML",
    )
    assert send_signed(endpoint, "HEAD", "/new-bucket")[0] == 404
    configuration = b"<CreateBucketConfiguration/>"
    assert send_signed(endpoint, "PUT", "/new-bucket", configuration) == (200, "")


def test_a_checksum_that_a_part_does_not_have_is_refused(endpoint: Endpoint) -> None:
    client = endpoint.client
    upload = {"Bucket": "data", "Key": "parts", "UploadId": ""}
    upload["UploadId"] = client.create_multipart_upload(Bucket="data", Key="parts")["UploadId"]
    etag = client.upload_part(**upload, PartNumber=1, Body=b"1")["ETag"]
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag>%s</Part>"
    path = f"/data/parts?uploadId={upload['UploadId']}"
    for claim in ("<ChecksumSHA256>AAAA</ChecksumSHA256>", "<ChecksumX>AAAA</ChecksumX>"):
        body = f"<CompleteMultipartUpload>{part % claim}</CompleteMultipartUpload>".encode()
        assert send_signed(endpoint, "POST", path, body) == (400, "InvalidPart")
    body = f"<CompleteMultipartUpload>{part % ''}</CompleteMultipartUpload>".encode()
    assert send_signed(endpoint, "POST", path, body) == (200, "")


def test_an_owner_that_the_server_does_not_know_is_refused(endpoint: Endpoint) -> None:
    assert send_signed(endpoint, "GET", "/data/a", x_amz_expected_bucket_owner="1")[0] == 501


@pytest.mark.parametrize(
    "change",
    [
        ("X-Amz-Algorithm=AWS4-HMAC-SHA256", "X-Amz-Algorithm=AWS4-HMAC-MD5"),
        ("X-Amz-Algorithm=AWS4-HMAC-SHA256&", ""),
        ("%2Fs3%2Faws4_request", "%2Fiam%2Faws4_request"),
        ("%2Fus-east-1%2Fs3%2Faws4_request", ""),
    ],
)
def test_a_url_that_is_signed_for_another_service_is_refused(
    endpoint: Endpoint, change: tuple[str, str]
) -> None:
    client = endpoint.connect(signature_version="s3v4")
    url = client.generate_presigned_url("get_object", {"Bucket": "data", "Key": "a"})
    path = url.removeprefix(endpoint.url)
    assert endpoint.send("GET", path, {})[0] == 200
    assert change[0] in path
    status, answer = endpoint.send("GET", path.replace(*change), {})
    assert status == 400
    assert b"AuthorizationQueryParametersError" in answer


def test_an_upload_does_not_ignore_its_checksum(endpoint: Endpoint) -> None:
    client = endpoint.client
    for kind in ({"ChecksumAlgorithm": "CRC64NVME"}, {"ChecksumType": "FULL_OBJECT"}):
        with pytest.raises(ClientError, match="NotImplemented"):
            client.create_multipart_upload(**TARGET, **kind)

    started = client.create_multipart_upload(**TARGET, ChecksumAlgorithm="SHA256")
    assert started["ChecksumAlgorithm"] == "SHA256"
    upload = {**TARGET, "UploadId": started["UploadId"], "PartNumber": 1}
    with pytest.raises(ClientError, match="expected checksum Type: sha256"):
        client.upload_part(**upload, Body=b"x", ChecksumAlgorithm="CRC32")
    client.upload_part(**upload, Body=b"x", ChecksumAlgorithm="SHA256")
    client.upload_part_copy(**upload, CopySource="data/a")


def test_a_listing_does_not_ignore_that_it_needs_owners(endpoint: Endpoint) -> None:
    with pytest.raises(ClientError, match="NotImplemented"):
        endpoint.client.list_objects_v2(Bucket="data", FetchOwner=True)
    endpoint.client.list_objects_v2(Bucket="data", FetchOwner=False)


def test_a_presigned_url_of_a_bucket_is_accepted(endpoint: Endpoint) -> None:
    for version in ("s3", "s3v4"):
        client = endpoint.connect(signature_version=version, s3={"addressing_style": "path"})
        url = client.generate_presigned_url("list_objects_v2", {"Bucket": "data", "Prefix": "a"})
        with urllib.request.urlopen(url) as answer:
            assert b"<Key>a</Key>" in answer.read()
