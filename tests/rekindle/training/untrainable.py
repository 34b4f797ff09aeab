"""Workloads that cannot be trained: the template's model each with one mistake."""

import re
from pathlib import Path
from typing import Any

from tests.commands import ROOT

TEMPLATE = (ROOT / "template/steps/MODULE.py").read_text()
MODEL = "    return nn.Sequential(*layers, nn.Flatten(0))\n"
MEAN = "(model(inputs) - kwh).square().mean()"
FORWARD = """\
    import torch

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*layers, nn.Flatten(0))
            {init}

        def forward(self, x):
            {forward}

    return Net()
"""
AVERAGE = 'the model changes its buffer "seen"'
SEEN = 'self.register_buffer("seen", torch.zeros(1, dtype=torch.{}))'
ADD = "self.seen += {}; return self.net(x)"
EMBED = "self.hours = nn.Embedding(24, 1, sparse=True)"


SPARSE_OPTIMIZER_CODE = """\
class Sparse(torch.optim.SGD):
        def step(self, closure=None):
            {step}

    return Sparse(model.parameters(), lr=0.1)
"""
SPARSE_ONLY = SPARSE_OPTIMIZER_CODE.format(step="raise ValueError('no sparse gradient')")
MADE_SPARSE = SPARSE_OPTIMIZER_CODE.format(
    step="[p.data.add_(p.grad.to_sparse()) for p in self.param_groups[0]['params']]"
)


def make_optimizer_source(value: str) -> str:
    return f"{TEMPLATE}\n\ndef optimizer(model, train):\n    import torch\n\n    {value}\n"


def make_function_source(signature: str, value: str) -> str:
    return f"{TEMPLATE}\n\ndef {signature}:\n    return {value}\n"


def change_template(old: str, new: str) -> str:
    assert old in TEMPLATE
    return TEMPLATE.replace(old, new)


def make_network_source(init: str, forward: str) -> str:
    return change_template(MODEL, FORWARD.format(init=init, forward=forward))


# code of a workload, and the beginning of the sentence that refuses it
FAULTS = {
    "a closure": (
        make_optimizer_source("return torch.optim.LBFGS(model.parameters())"),
        "the workload's optimizer LBFGS cannot",
    ),
    "sparse adam": (
        make_optimizer_source("return torch.optim.SparseAdam(model.parameters())"),
        "the workload's optimizer SparseAdam cannot make a step",
    ),
    "sparse gradients": (
        make_network_source(EMBED, "return self.net(x) + self.hours(x[:, 0].long()).flatten()"),
        "a layer of the model has sparse gradients",
    ),
    "only sparse": (
        make_optimizer_source(SPARSE_ONLY),
        "the workload's optimizer Sparse cannot make a step (no sparse gradient)",
    ),
    "made sparse": (
        make_optimizer_source(MADE_SPARSE),
        "the workload's optimizer Sparse makes sparse gradients",
    ),
    "optimizers": (
        make_optimizer_source("return [torch.optim.Adam(model.parameters())]"),
        "`optimizer` returned [Adam (",
    ),
    "complex": (
        change_template(MEAN, f"{MEAN} + 0j"),
        "loss(model, batch) returned a complex tensor of shape ()",
    ),
    "lazy": (
        change_template("Linear(2, section", "LazyLinear(section"),
        "parameter 1.weight of the model has no shape yet",
    ),
    "measures": (
        make_function_source("measures(model, batch)", "[1.0]"),
        "measures(model, batch) returned [1.0]: it must return",
    ),
    "measure": (
        make_function_source("measures(model, batch)", "{'m': 'x'}"),
        "measures(model, batch) returned {'m': 'x'}: ",
    ),
    "schedule": (
        make_function_source("schedule(step, total)", "None"),
        "schedule(step, total) returned None for step 0: it must",
    ),
    "rate": (
        make_function_source("schedule(step, total)", "float('nan')"),
        "schedule(step, total) returned nan for step 0: ",
    ),
    "no optimizer": (
        make_optimizer_source("torch.optim.Adam(model.parameters())"),
        "`optimizer` returned None",
    ),
    "parameters": (
        make_optimizer_source("return torch.optim.Adam(model[1].parameters())"),
        "the workload's optimizer lacks",
    ),
    "float64": (
        change_template(MODEL, MODEL.replace("(0))", "(0)).double()")),
        "parameter 1.weight of the model is not",
    ),
    "frozen": (
        change_template(MODEL, MODEL.replace("(0))", "(0)).requires_grad_(False)")),
        "the model lacks a trainable",
    ),
    "buffer": (
        make_network_source(SEEN.format("float64"), ADD.format("x.double().mean()")),
        AVERAGE,
    ),
    "integer": (
        make_network_source(SEEN.format("int64"), ADD.format("(x[:, 0] > 12).sum()")),
        'the model changes its buffer "seen"',
    ),
    "facts": (
        change_template("BatchNorm1d(2)", 'BatchNorm1d(facts["columns"])'),
        "`model` failed on a few rows: ",
    ),
    "no module": (
        change_template(MODEL, "    return layers\n"),
        "model(section, facts) returned (BatchNorm1d",
    ),
    "no mean": (
        change_template(MEAN, MEAN.removesuffix(".mean()")),
        "loss(model, batch) returned a tensor of shape (32,)",
    ),
    "shapes": (
        change_template("Linear(2, section", "Linear(3, section"),
        "`loss` failed on a few rows: ",
    ),
    "tensors": (
        change_template("instances])).tolist()", "instances]))"),
        "`predict` returned Tensor: ",
    ),
}


def write_workload(folder: Path, name: str, code: str) -> dict[str, Any]:
    """Write a workload and its data into `folder`; return the sections of a config."""
    module = re.sub(r"\W", "_", f"power_{name}")
    (folder / f"{module}.py").write_text(code)
    rows = (f"{hour % 24},{hour % 31},{hour % 24 / 3}\n" for hour in range(3000))
    (folder / "power.csv").write_text("hour,temperature,kwh\n" + "".join(rows))
    train = {"virtual_workers": 8, "device": "auto", "validation": 0.1}
    return {
        "workload": module,
        "data": {"source": str(folder / "power.csv")},
        "model": {},
        "train": train,
    }
