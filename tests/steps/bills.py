"""Make the module of a workload with a moving window, for tests of the step `prepare`.

(folder / "bills.py").write_text(workload("count: int", "return Prepared(rows=data.count)"))
"""

from textwrap import indent

MODULE = """
from rekindle import DataConfig, Metric, Prepared, Section


class Data(DataConfig):
    window: str = ""
    until: str = ""
{fields}

    def at(self, time):
        return self.model_copy(update={{"until": time.isoformat()}})


class Model(Section):
    pass


metrics = (Metric("rmse", max),)


def prepare(data, out):
{prepare}


def dataset(path, split): ...
def model(section, facts): ...
def loss(model, batch): ...
def examples(path): ...
def predictor(release): ...
"""


def make_workload(fields: str, prepare: str) -> str:
    """Return the module with `fields` in the section `data`, and `prepare` as the body of the
    function `prepare`."""
    return MODULE.format(fields=indent(fields, "    "), prepare=indent(prepare, "    "))
