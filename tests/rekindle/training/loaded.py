"""Preloaded modules of the processes of a crew: all imports of a worker, and boto3's description of
S3."""

import gc

import torch._dynamo  # noqa: F401

import rekindle.training.launch.launcher
import rekindle.training.loop
import rekindle.training.membership.server  # noqa: F401
from rekindle.storage import Store
from tests.rekindle.training import toy  # noqa: F401

Store("any", "http://127.0.0.1:9", "any", "any")
gc.collect()
# freeze all objects; otherwise each process copies the memory pages of all loaded modules
gc.freeze()
