"""The modules that the forkserver of the tests has imported."""

import torch

# the first step of an optimizer imports it, for some seconds
import torch._dynamo
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401

import rekindle.attached.program  # noqa: F401
import tests.rekindle.attached.programs  # noqa: F401
