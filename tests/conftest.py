"""Fixtures: a real S3 endpoint and a real MLflow server, one each for a test session."""

import os

THREADS = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.update(THREADS)  # two test processes share two cores
