"""The parsers of untrusted input, each with checks of the parser's result. A case of a fuzz target
fails if the parser raises an unexpected exception, hangs, or returns or writes something dangerous.

Each function of TARGETS prepares its inputs in `folder`, and returns the function that runs a case.
"""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import socket
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlsplit

import yaml
from pydantic import BaseModel, Field

from argolocal.manifest.read import parse_objects
from argolocal.pods.archives import ArchiveError, is_tarball, unpack_tar, unpack_zip
from argolocal.validate import lint
from rekindle.errors import ConfigError, DataError
from rekindle.local.services.login import MlflowLogin
from rekindle.local.services.s3.format import BLOCK_BYTES
from rekindle.local.services.s3.handler import RequestHandler
from rekindle.local.services.s3.object_files import START_POSITION, ObjectFiles
from rekindle.local.services.s3.signatures import Signature, compute_signing_key
from rekindle.local.services.threaded_server import find_head_fault
from rekindle.release.request_validation import parse_body
from tests.argolocal.runner.everything import EVERYTHING
from tests.fuzz.answers import cluster_objects, mlflow_answers
from tests.fuzz.documents import parameters, stored_documents
from tests.fuzz.mutation import change, mutate_bytes
from tests.fuzz.names import names_from_outside
from tests.fuzz.text import expressions, yaml_texts
from tests.fuzz.training import checkpoints, coordinator_lines, snapshots
from tests.fuzz.web import web_answers

Case = Callable[[random.Random], None]


def archives(folder: Path) -> Case:
    """Unpack changed tarballs and zips; nothing may be written outside of the target folder."""
    outside = folder / "outside"
    unpack_folder = folder / "place"
    outside.write_text("precious")
    unpack_folder.mkdir()
    kinds = [b"0", b"5", b"2", b"1", b"3", b"S", b"L", b"x", b"g"]
    names = ["a", "a/b", "l", "l/x", "../outside", "x" * 150, "/tmp/x"]
    seeds = []

    for number in range(40):
        rng = random.Random(number)
        packed = io.BytesIO()
        tar_format: Any = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])

        with tarfile.open(fileobj=packed, mode="w", format=tar_format) as tar:
            for _ in range(rng.randrange(1, 5)):
                info = tarfile.TarInfo(rng.choice(names))
                info.type, info.linkname = (
                    rng.choice(kinds[:6]),
                    rng.choice([".", "..", "a", "l/..", "../outside"]),
                )

                info.size = 700 if info.isreg() else 0
                if info.isreg() and rng.random() < 0.3:
                    info.pax_headers = make_sparse_headers(rng)

                with suppress(ValueError):
                    tar.addfile(info, io.BytesIO(b"x" * info.size))

        seeds.append(packed.getvalue()[:6000])

    zips = []
    for number in range(8):
        packed = io.BytesIO()
        with zipfile.ZipFile(
            packed, "w", zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
        ) as archive:
            for name in names[: 1 + number % 5]:
                archive.writestr(name, b"x" * 50 * number)

        zips.append(packed.getvalue())

    def case(rng: random.Random) -> None:
        archive = unpack_folder / "in.tmp"
        target = unpack_folder / "in"

        zipped = rng.random() < 0.2
        if zipped:
            data = mutate_bytes(rng.choice(zips), rng, zips)
            if rng.random() < 0.2 and (directory := data.find(b"PK\1\2")) >= 0:
                zip_entry = data[directory : directory + 46 + 9]
                end = data.rfind(b"PK\5\6")
                data = data[:directory] + zip_entry * rng.randrange(3000) + data[end:]

            archive.write_bytes(data)
        else:
            data = mutate_bytes(rng.choice(seeds), rng, seeds)
            if rng.random() < 0.9:
                data = b"".join(
                    _fix_checksum(data[start : start + 512]) for start in range(0, len(data), 512)
                )

            if rng.random() < 0.2:
                data = sparse_member(rng) + data

            if rng.random() < 0.2:
                block_bytes = 1 + int(rng.expovariate(0.001))
            else:
                block_bytes = len(data) or 1

            packed = b"".join(
                gzip.compress(data[start : start + block_bytes], 1)
                for start in range(0, len(data) or 1, block_bytes)
            )
            if rng.random() < 0.05:
                packed = gzip.compress(b"", 1) * rng.randrange(20_000) + packed

            archive.write_bytes(packed if rng.random() < 0.9 else mutate_bytes(packed, rng, seeds))
            is_tarball(archive)

        with suppress(ArchiveError):
            (unpack_zip if zipped else unpack_tar)(archive, target)

        assert outside.read_text() == "precious"
        archive.unlink(missing_ok=True)
        if target.is_dir():
            for path in [target, *target.rglob("*")]:
                mode = path.lstat().st_mode
                assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode), path
                assert Path(os.path.realpath(path)).is_relative_to(target), path

            shutil.rmtree(target)

        target.unlink(missing_ok=True)
        assert os.listdir(unpack_folder) == []
        assert sorted(os.listdir(folder)) == ["outside", "place"]

    return case


def make_sparse_headers(rng: random.Random) -> dict[str, str]:
    """Return pax headers of a sparse file, which may be invalid."""
    offsets_and_sizes: list[int] = []
    for _ in range(rng.randrange(1, 30)):
        if rng.random() < 0.8:
            part_start = sum(offsets_and_sizes[-2:])
        else:
            part_start = rng.randrange(-5, 5000)

        offsets_and_sizes += [
            part_start + rng.choice([0, 0, 100]),
            rng.choice([0, 1, 20, 512, 1 << 40]),
        ]

    stated_size = rng.choice([sum(offsets_and_sizes[-2:]), 700, 1 << 42])
    headers = {"name": "a", "map": ",".join(map(str, offsets_and_sizes)), "size": str(stated_size)}

    headers.update(
        rng.choice(
            [
                {"major": "0", "minor": "1"},
                {"major": "1", "minor": "0", "realsize": str(stated_size)},
            ]
        )
    )

    return {f"GNU.sparse.{name}": value for name, value in headers.items()}


def sparse_member(rng: random.Random) -> bytes:
    """Return the bytes of a sparse file as the first member of a tarball."""
    info = tarfile.TarInfo("a")
    content = rng.randbytes(1024)
    info.size, info.pax_headers = len(content), make_sparse_headers(rng)
    return info.tobuf(tarfile.PAX_FORMAT) + content


def _fix_checksum(block: bytes) -> bytes:
    """Return the block of a tarball unchanged, or with a valid checksum if it is a header."""
    if block[257:262] != b"ustar" or len(block) < 512:
        return block
    bare = block[:148] + b" " * 8 + block[156:]
    return bare[:148] + b"%06o\0 " % sum(bare) + bare[156:]


KEYS = ("key", "secret")
XML = b"<Delete><Object><Key>a</Key></Object></Delete>"
PARTS = b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>"
CHUNKS = b"3\r\nabc\r\n0\r\nx-amz-checksum-crc32:NSRBwg==\r\n\r\n"
STREAM = {
    "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    "x-amz-trailer": "x-amz-checksum-crc32",
}
REQUESTS: list[tuple[str, str, dict[str, str], bytes]] = [
    ("GET", "/data/a", {"Range": "bytes=0-1"}, b""),
    ("GET", "/data?list-type=2&prefix=a&max-keys=2&delimiter=/&continuation-token=YQ==", {}, b""),
    ("GET", "/data/a?response-content-type=text/plain", {"If-None-Match": '"x"'}, b""),
    ("PUT", "/data/a", {"x-amz-meta-who": "me", "Content-Type": "text/plain"}, b"abc"),
    ("PUT", "/data/b", {"x-amz-copy-source": "/data/a"}, b""),
    (
        "PUT",
        "/data/a",
        {"x-amz-decoded-content-length": "3", "Content-Encoding": "aws-chunked", **STREAM},
        CHUNKS,
    ),
    ("PUT", "/data/a?partNumber=1&uploadId=0", {"Content-MD5": "kAFQmDzST7DWlj99KOF/cg=="}, b"abc"),
    ("POST", "/data/a?uploads", {}, b""),
    ("POST", "/data/a?uploadId=0", {}, PARTS),
    ("POST", "/data?delete", {}, XML),
    ("DELETE", "/data/a", {}, b""),
    ("HEAD", "/data", {}, b""),
    (
        "GET",
        "/data?uploads&prefix=a&key-marker=a&upload-id-marker=0&max-uploads=2&encoding-type=url",
        {},
        b"",
    ),
    ("GET", "/data/a?uploadId=0&max-parts=2&part-number-marker=0", {}, b""),
    ("PUT", "/data/a%00", {}, b"abc"),
    (
        "PUT",
        "/data/%EF%BF%BD",
        {"x-amz-copy-source": "/data/a%00", "x-amz-copy-source-if-match": '"x"'},
        b"",
    ),
    (
        "GET",
        "/data/a",
        {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT", "If-Range": '"x"'},
        b"",
    ),
    ("GET", "/data/a?response-content-disposition=a%0d%0ab&response-content-length=3", {}, b""),
    ("DELETE", "/data/a", {"If-Match": '"x"'}, b""),
]


def s3_requests(folder: Path) -> Case:
    """Send requests to the embedded object store: complete heads, with or without a valid
    signature, and bodies. No request to the object store may get the status 500."""
    files = ObjectFiles(folder / "s3")
    files.create("data")
    buffer = memoryview(bytearray(BLOCK_BYTES))

    def case(rng: random.Random) -> None:
        method, target, headers, body = rng.choice(REQUESTS)
        headers = {"Host": "h", **headers}
        other_bodies = [body, XML, PARTS, CHUNKS]

        if rng.random() < 0.4:
            target = mutate_bytes(target.encode(), rng, other_bodies).decode("latin-1")

        if rng.random() < 0.4:
            name = rng.choice(list(headers))
            headers[name] = mutate_bytes(headers[name].encode(), rng, other_bodies).decode(
                "latin-1"
            )

        if rng.random() < 0.5:
            body = mutate_bytes(body, rng, other_bodies)

        headers["Content-Length"] = str(len(body))
        if rng.random() < 0.9:
            with suppress(ValueError, UnicodeError):
                headers.update(_sign_headers(method, target, headers))

        lines = [
            f"{method} {target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
            "",
            "",
        ]
        if rng.random() < 0.2:
            line = rng.choice(["X : y", "X y", " X: y", "X: y\n", "X: y"])
            lines.insert(rng.randrange(1, len(lines) - 1), line)

        head = "\r\n".join(lines).encode("latin-1", "replace")
        if rng.random() < 0.1:
            head = mutate_bytes(head, rng, other_bodies)

        status = exchange(head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", body)
        assert status != 500, (head, body)
        check_listing()

    def check_listing() -> None:
        """Check that all pages of a listing together contain exactly the stored objects."""
        listed_keys = []
        position = START_POSITION
        while True:
            page = files.page("data", "", "", position, 2)
            listed_keys += [meta["key"] for meta in page.entries]
            if not page.next_after:
                break
            position = page.next_after
        assert listed_keys == files.keys["data"]
        assert all(len(key.encode()) <= 1024 for key in listed_keys)

    def exchange(head: bytes, body: bytes) -> int:
        if find_head_fault(head):
            return 400

        client, server = socket.socketpair()
        with client, server:
            client.settimeout(5)
            server.settimeout(5)
            client.sendall(body)
            client.shutdown(socket.SHUT_WR)

            with suppress(ConnectionError):
                handler = RequestHandler(server, head, KEYS, buffer, files)
                # the attribute is missing if the parser rejected the request line
                parsed = getattr(handler, "headers", None)
                assert parsed is None or len(parsed) == head.count(b"\r\n") - 2, head

            server.close()
            answer = b""
            # the connection may be reset because the body was not read
            with suppress(ConnectionError):
                while chunk := client.recv(1 << 16):
                    answer += chunk

        head_lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
        names = [line.partition(b":")[0].lower() for line in head_lines]
        assert names.count(b"content-length") <= 1, answer
        assert b"set-cookie" not in names, answer

        last_response = answer.rpartition(b"HTTP/1.1 ")[2]
        if last_response[:3].isdigit():
            return int(last_response[:3])

        return 0

    return case


def _sign_headers(method: str, target: str, headers: dict[str, str]) -> dict[str, str]:
    date = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{date[:8]}/us-east-1/s3/aws4_request"
    signed_values = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD", **headers, "x-amz-date": date}

    signed_values = {
        name.lower(): value
        for name, value in signed_values.items()
        if name == "Host" or name.lower().startswith("x-amz-")
    }

    url = urlsplit(target)
    query_pairs = parse_qsl(url.query, keep_blank_values=True)
    query = "&".join(
        sorted(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query_pairs
        )
    )
    names = sorted(signed_values)
    lines = [f"{name}:{' '.join(signed_values[name].split())}" for name in names]
    path = quote(unquote_to_bytes(url.path), safe="/-_.~")
    canonical_request = "\n".join(
        [method, path, query, *lines, "", ";".join(names), signed_values["x-amz-content-sha256"]]
    )
    signer = Signature(compute_signing_key(KEYS[1], scope), date, scope)
    signature = signer.next("", hashlib.sha256(canonical_request.encode("latin-1")).hexdigest())
    credential = f"AWS4-HMAC-SHA256 Credential={KEYS[0]}/{scope}"
    signed_headers = {name: signed_values[name] for name in ("x-amz-date", "x-amz-content-sha256")}

    return signed_headers | {
        "Authorization": f"{credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    }


def mlflow_heads(folder: Path) -> Case:
    """Check heads of requests to the embedded MLflow: only requests with the token or the cookie
    are let through."""
    login = MlflowLogin("secret-token", 5000)
    session = login.login.session

    fields = [
        "Host: 127.0.0.1:5000",
        "Host: localhost",
        "Authorization: Bearer secret-token",
        "Accept: */*",
    ]

    fields += [
        "Sec-Fetch-Site: none",
        f"Cookie: a=b; {login.login.cookie}={session}",
        "Origin: http://localhost",
    ]

    targets = [
        "/",
        "/?token=secret-token",
        "/health",
        "/api/2.0/mlflow/experiments/search?max_results=1",
    ]

    header_lines = [field.encode() for field in fields]

    def case(rng: random.Random) -> None:
        lines = [
            f"{rng.choice(['GET', 'POST', 'HEAD'])} {rng.choice(targets)} HTTP/1.1",
            fields[0],
        ]
        lines += rng.sample(fields, rng.randrange(len(fields)))
        head = "\r\n".join([*lines, "", ""]).encode()

        if rng.random() < 0.8:
            head = mutate_bytes(head, rng, header_lines).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        if find_head_fault(head):
            return

        login_answer = login.answer(head)
        has_secret = b"secret-token" in head or session.encode() in head

        if login_answer is None:
            assert has_secret, head
        else:
            assert (
                login_answer[9:12] in (b"401", b"403")
                or login_answer.endswith(b"\r\n\r\nOK")
                or has_secret
            ), (head, login_answer)
            assert login_answer.count(b"\r\n\r\n") == 1, (head, login_answer)
            # invalid bytes are escaped in the answer, so the beginning of the session may be cut
            # off in it
            knows_session = has_secret or session[4:].encode() in head
            assert knows_session or session.encode() not in login_answer, (head, login_answer)

    return case


def manifests(folder: Path) -> Case:
    """Read and lint files for `rekindle run --manifest`."""
    full_manifest = yaml.safe_load(EVERYTHING)
    single_template_manifests = [
        full_manifest
        | {
            "spec": full_manifest["spec"]
            | {"templates": [template], "entrypoint": template["name"]}
        }
        for template in full_manifest["spec"]["templates"]
    ]
    small_manifest = (
        "kind: Workflow\nmetadata: {name: w}\nspec:\n  entrypoint: a\n  templates:\n  - {name: a,"
        " suspend: {}}\n"
    )
    texts = [small_manifest.encode(), json.dumps(single_template_manifests[-1]).encode()]

    def case(rng: random.Random) -> None:
        if rng.random() < 0.5:
            text = mutate_bytes(rng.choice(texts), rng, texts).decode(errors="replace")
        else:
            value = rng.choice(single_template_manifests)
            for _ in range(rng.randrange(1, 4)):
                value = change(value, rng)
            text = json.dumps(value)
        try:
            for manifest in parse_objects(text):
                lint(manifest)
        except ConfigError as error:
            assert len(str(error)) < 10_000

    return case


class Instance(BaseModel):
    id: int | str
    amount: float = Field(ge=0)
    time: datetime | None = None
    kind: Literal["a", "b"] = "a"
    more: list[dict[str, float]] = Field(default_factory=list)


class Request(BaseModel):
    instances: list[Instance] = Field(min_length=1, max_length=50)


def http_bodies(folder: Path) -> Case:
    """Parse bodies of requests for predictions."""
    example = {
        "id": "a",
        "amount": 1.5,
        "time": "2026-01-01T00:00:00Z",
        "kind": "b",
        "more": [{"x": 1}],
    }

    seeds = [json.dumps({"instances": [example] * count}).encode() for count in (1, 3)]

    def case(rng: random.Random) -> None:
        body = mutate_bytes(rng.choice(seeds), rng, seeds)
        if rng.random() < 0.3:
            body = json.dumps(change({"instances": [example, example]}, rng)).encode()
        if rng.random() < 0.1:
            body = body.replace(b"1.5", b"1" + b"0" * rng.randrange(5000))
        try:
            parse_body(Request, body)
        except DataError as error:
            assert len(str(error)) < 10_000
            assert not {"\x1b", "\0"} & set(str(error))

    return case


TARGETS: dict[str, Callable[[Path], Case]] = {
    "archives": archives,
    "s3 requests": s3_requests,
    "mlflow heads": mlflow_heads,
    "manifests": manifests,
    "http bodies": http_bodies,
    "coordinator lines": coordinator_lines,
    "checkpoints": checkpoints,
    "snapshots": snapshots,
    "yaml texts": yaml_texts,
    "expressions": expressions,
    "web answers": web_answers,
    "names": names_from_outside,
    "documents": stored_documents,
    "parameters": parameters,
    "mlflow answers": mlflow_answers,
    "cluster objects": cluster_objects,
}


def create_scratch_folder() -> Path:
    """Create a temporary directory, which is in memory if possible."""
    return Path(
        tempfile.mkdtemp(
            prefix="rekindle-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        )
    )
