"""Tests of the thread that sends a program's metrics to MLflow."""

import threading

from rekindle.program.curves import MetricCurves


def test_a_pod_forks_its_program_while_no_thread_imports_a_module() -> None:
    threads = threading.enumerate()
    curves = MetricCurves("run")
    assert threading.enumerate() == threads
    curves.close()
