"""Import the libraries of tests/programs that the forkserver of the tests needs."""

import accelerate  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.trainer  # noqa: F401
