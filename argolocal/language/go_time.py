"""Values of Go's time.Time and time.Duration in expressions such as `(now() - t).Seconds() > 30`.

The times and durations are dicts whose values are the methods, because expr.py looks up a method
like a key.
"""

from argolocal.language.functions import ExprError


class GoDuration(dict[str, object]):
    """A duration with the methods Seconds, Minutes and Hours."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            Seconds=lambda: seconds, Minutes=lambda: seconds / 60, Hours=lambda: seconds / 3600
        )
        self.seconds = seconds


class GoTime(dict[str, object]):
    """A time in unix seconds with the methods Unix, Before, After and Sub."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            Unix=lambda: int(seconds // 1),
            Before=lambda other: seconds < _require_time(other).seconds,
            After=lambda other: seconds > _require_time(other).seconds,
            Sub=lambda other: self - _require_time(other),
        )
        self.seconds = seconds

    def __sub__(self, other: "GoTime") -> GoDuration:
        return GoDuration(self.seconds - other.seconds)


def _require_time(value: object) -> GoTime:
    if not isinstance(value, GoTime):
        raise ExprError(f"{value!r} is not a time")
    return value
