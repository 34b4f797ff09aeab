"""Render HTML with Jinja templates, which escape all values. The Jinja templates of a package are
in its folder `templates/`."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from argolocal.common.wording import escape_control_chars, format_duration


def make_environment(packages: tuple[str, ...]) -> Environment:
    """Return a Jinja environment with the templates of several packages. If several packages
    contain a template, the first package is used."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": format_duration,
        "age": age,
        "moment": moment,
        "visible": escape_control_chars,
        "with_code": with_code,
        "bytes": format_bytes,
        "measure": format_measure,
    }
    return environment


def age(text: str | None) -> str:
    """Return how long ago a time in RFC 3339 format was, such as "3 h 20 min ago"."""
    if not text:
        return ""
    try:
        start = datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError):
        # another program may have written the time in another format, which is shown unchanged
        return escape_control_chars(str(text))
    seconds = max(0.0, time.time() - start)
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days ago"
    return f"{format_duration(round(seconds))} ago"


def with_code(text: str) -> Markup:
    """Convert a sentence to HTML. Texts between backticks become `code` elements."""
    return Markup("").join(
        Markup("<code>{}</code>").format(fragment) if number % 2 else fragment
        for number, fragment in enumerate(escape_control_chars(text).split("`"))
    )


def moment(text: str) -> str:
    """Format a time, given in RFC 3339 format, as "Mon 2026-11-30 03:00 UTC"."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%a %Y-%m-%d %H:%M UTC")


def format_bytes(count: int) -> str:
    """Format a number of bytes as `812 bytes`, `3.4 kB` or `210 MB`."""
    if count < 1000:
        return f"{count} bytes"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        value = count / size
        if value < 999.5 or unit == "GB":
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return ""


def format_measure(value: float) -> str:
    """Format a measure with four decimal places, or fewer for a large value: `0.0536`, `30.25`."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def render(environment: Environment, template: str, values: Mapping[str, Any]) -> str:
    """Return the HTML of a template, with `values` as its variables."""
    return environment.get_template(template).render(values)
