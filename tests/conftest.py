"""Fixtures: a real S3 endpoint and a real MLflow server, one each for a test session."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.local.cluster import LocalCluster

THREADS = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.update(THREADS)  # two test processes share two cores
