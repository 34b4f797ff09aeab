"""The modules that the forkserver of the tests has imported."""

import torch

# import this module now, because the first step of an optimizer would import it, which takes
# seconds
import torch._dynamo
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401

import rekindle.attached.program  # noqa: F401
import tests.rekindle.attached.programs  # noqa: F401
