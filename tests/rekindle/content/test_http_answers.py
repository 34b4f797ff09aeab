"""A server that answers slowly cannot keep a command waiting for ever."""

import threading

import pytest

from rekindle.content.http_answers import UnreadableAnswer, read_limited


class SlowBody:
    """A body whose next byte always arrives just before the time limit of the connection."""

    def read1(self, amt: int, decode_content: bool | None = None) -> bytes:
        threading.Event().wait(0.02)
        return b" "


def test_an_answer_that_arrives_byte_by_byte_ends_with_an_error() -> None:
    with pytest.raises(UnreadableAnswer, match=r"its answer takes more than 0\.1 s"):
        read_limited(SlowBody(), 1000, timeout_s=0.1)
