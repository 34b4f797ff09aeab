"""Import the modules that the forkserver of the tests needs."""

import torch
import torch.distributed
import torch.nn.parallel  # noqa: F401

import rekindle.program.agent
import rekindle.program.coordinator  # noqa: F401
