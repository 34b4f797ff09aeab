"""What members of a crew inherit: all that a worker imports, and boto3's descriptions of S3."""

import gc

import torch._dynamo  # noqa: F401

import rekindle.training.launch.launcher
import rekindle.training.loop
import rekindle.training.membership.server  # noqa: F401
from rekindle.storage import Store
from tests.rekindle.training import toy  # noqa: F401

Store("any", "http://127.0.0.1:9", "any", "any")
gc.collect()
gc.freeze()  # or each member copies the pages of all that is loaded
