"""A small described cluster for the two commands that simulate."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MODEL = {
    "num-layers": 8,
    "hidden-size": 64,
    "seq-length": 128,
    "micro-batch-size": 2,
    "pipeline-model-parallel-size": 4,
    "num-microbatches": 8,
}
TIMES = {"layer-forward-ms": 2}
FLOPS = {"tflops-per-rank": 0.5, "ffn-hidden-size": 128, "num-attention-heads": 4}
CLUSTER = {"bandwidth-between-nodes": 0.1, "bandwidth-inside-node": 1}
RIGHT = MODEL | TIMES | CLUSTER


def typed(flags):
    """As on the command line; True is a flag without a value, None is left out."""
    words = []
    for name, value in flags.items():
        if value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *(map(str, values) if value is not True else ())]
    return words


def tool(name):
    """A command's main function, in this process."""
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))["main"]
