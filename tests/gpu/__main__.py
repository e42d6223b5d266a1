"""`python -m tests.gpu --json OUT.json`: every check of a GPU, each by itself, in one report.

Where there is no GPU the same checks run on a device made of the CPU, as far as it goes; what needs
a GPU is listed as not run. Exit code 0: nothing wrong, grown or broken; 1: the report tells what.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu import device as standin
from tests.gpu import steps

QUICK = [
    "linear",
    "conv2d_groups",
    "embedding",
    "lstm",
    "language_model",
    "boolean_mask",
    "tied_embedding_and_output",
    "laplacian",
    "complex_parameters",
    "residual_network",
    "rms_norm",
    "in_place_activations_and_additions",
]
_NEEDS_GPU = "not run: needs a GPU"

Step = Callable[[], dict[str, Any]]


def on_gpu(names: list[str] | None) -> dict[str, Step]:
    """Return the steps of a real GPU."""
    device = torch.device("cuda")

    def table(precision: str, *, on: bool) -> dict[str, Any]:
        with steps.tf32(on=on):
            return steps.table(device, precision, names)

    return {
        "float32": lambda: table("float32", on=False),
        "float32 as tf32": lambda: table("tf32", on=True),
        "bfloat16": lambda: table("bfloat16", on=False),
        "autocast": lambda: table("autocast", on=False),
        "chains": lambda: steps.chains(device),
        "rules": lambda: steps.rules(device, steps.RULES.keys() - {"LinearBackward0"}),
        "fixed random numbers": lambda: steps.fixed(device),
        "waits": lambda: steps.waits(device),
        "memory": lambda: steps.memory(device),
        "run to a file": lambda: steps.run_to_file(device),
        "two processes": lambda: steps.shared(device),
        "benchmarks": lambda: steps.benchmarks(device),
    }


def on_standin(names: list[str] | None) -> dict[str, Step]:
    """Return the steps of a device made of the CPU."""
    device = standin.register()

    def without_double(step: Step) -> Step:
        def run() -> dict[str, Any]:
            with standin.without_double():
                return step()

        return run

    apple = {"LinearBackward0"}

    return {  # those without float64 first: gradscope asks a device once
        "float32 without float64": without_double(lambda: steps.table(device, "float32", names)),
        "chains without float64": without_double(lambda: steps.chains(device)),
        "fixed random numbers without float64": without_double(lambda: steps.fixed(device)),
        "run to a file without float64": without_double(lambda: steps.run_to_file(device)),
        "rules without float64": without_double(lambda: steps.rules(device, apple)),
        "float32": lambda: steps.table(device, "float32", names),
        "chains": lambda: steps.chains(device),
        "rules": lambda: steps.rules(device, steps.RULES.keys() - apple),
        "waits": lambda: steps.waits(device, names and ["dense", "embedding"]),
        "bfloat16": lambda: steps.table(device, "bfloat16", names),
        "run to a file": lambda: steps.run_to_file(device),
        "fixed random numbers": lambda: steps.fixed(device),
        "an index out of range": steps.lost,
        "memory runs out": lambda: steps.full(4 if names else 12),
    }


def main() -> int:
    """Run all steps and write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write the report")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} of the cases")
    parser.add_argument("--steps", metavar="NAME,NAME", help="only these")
    parser.add_argument("--standin", action="store_true", help="not on a GPU, if there is one")
    options = parser.parse_args()
    names = QUICK if options.quick else None
    real = torch.cuda.is_available() and not options.standin
    chosen = on_gpu(names) if real else on_standin(names)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if real else f"{standin.NAME}: made of the CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": {},
    }
    for name, step in chosen.items():
        if options.steps is None or name in options.steps.split(","):
            report["steps"][name] = _isolated(name, step)
            _write(report, options.json)
    if not real:
        for name in ("memory", "autocast", "two processes", "benchmarks"):
            report["steps"][name] = {"status": _NEEDS_GPU}
    _write(report, options.json)
    print(json.dumps(report, indent=1) if options.json is None else _lines(report))
    return int(any(step["status"] == "failed" for step in report["steps"].values()))


def _isolated(name: str, step: Step) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        found = step()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        found = {"broken": traceback.format_exc()[-3000:]}
    failed = any(found.get(key) for key in ("wrong", "broken", "grows"))
    seconds = round(time.perf_counter() - begun, 1)
    print(f"{name}: {'FAILED' if failed else 'passed'} in {seconds} s", file=sys.stderr, flush=True)
    return {"status": "failed" if failed else "passed", "seconds": seconds, **found}


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _lines(report: dict[str, Any]) -> str:
    lines = [f"{report['device']}, torch {report['torch']}"]
    return "\n".join([*lines, *(f"  {k}: {v['status']}" for k, v in report["steps"].items())])


if __name__ == "__main__":
    sys.exit(main())
