"""A pytest plugin that reports skipped tests, and fails in CI for skips that are not allowed.

In CI (the variable CI is set) a skipped test is a failure, unless the variable TESTS_MAY_SKIP
contains the reason of the skip; the reasons in TESTS_MAY_SKIP are separated by commas.
"""

import os
from collections import Counter

import pytest

ALLOWED_VARIABLE = "TESTS_MAY_SKIP"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in count_skips(terminalreporter).items():
        terminalreporter.write_line(f"NOT TESTED HERE: {count} tests, {reason}", yellow=True)
    forbidden_reasons = list_forbidden_reasons(terminalreporter)
    if forbidden_reasons:
        terminalreporter.write_line(
            f"In CI that is a failure, unless {ALLOWED_VARIABLE} has: {','.join(forbidden_reasons)}",
            red=True,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not session.exitstatus and list_forbidden_reasons(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def count_skips(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Return the number of skipped tests by reason."""
    reports = [
        report for report in reporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)
    ]
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def list_forbidden_reasons(reporter: pytest.TerminalReporter) -> list[str]:
    """Return the reasons of skipped tests that count as failures in this session."""
    allowed = {reason.strip() for reason in os.environ.get(ALLOWED_VARIABLE, "").split(",")}
    if os.environ.get("CI"):
        return sorted(count_skips(reporter).keys() - allowed)
    return []
