"""`python -m tests.models.parity`: every family, and models computed through the fallback, against `transformers`.

A table, and what a load takes. Exits with 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does for the modules of this folder

from family_parity import FamilyUnderTest, Parity
from load_memory import make_checkpoint, measure
from tiny_fallbacks import TINY_FALLBACKS
from tiny_families import TINY_FAMILIES

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.workers.models.sizes import check_ranks

TOLERANCE = 1e-4
ROW = "{:<22} {:<24} {:>7} {:>10} {:>5} {:>20} {:>9} {:>9} {:>9} {:>9}"
GRIDS = {
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "TP2 PP2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "expert_parallel": True},
}


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.models.parity", description=__doc__).parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print("On several ranks: the largest difference of a logprob, or X where tokens differ.")
    print(ROW.format("model", "architecture", "tokens", "mismatches", "ties", "max logprob diff.", *GRIDS))
    exact = True
    fallbacks = {f"{name} (fallback)": family for name, family in TINY_FALLBACKS.items()}
    for name, family in {**TINY_FAMILIES, **fallbacks}.items():
        with tempfile.TemporaryDirectory() as directory:
            model = FamilyUnderTest(family, Path(directory))
            parities = [*(model.compare(answers) for answers in model.modes().values()), model.preempted()]
            grids = {title: on_ranks(model, grid) for title, grid in GRIDS.items()}
            model.executor.shutdown()
        mismatches = sum(len(parity.mismatches) for parity in parities)
        difference = max(parity.max_logprob_difference for parity in parities)
        exact &= mismatches == 0 and difference < TOLERANCE and all(is_exact(each) for each in grids.values())
        tokens, ties = sum(parity.num_tokens for parity in parities), sum(parity.num_ties for parity in parities)
        cells = [cell(parity) for parity in grids.values()]
        print(ROW.format(name, family.architecture, tokens, mismatches, ties, f"{difference:.1e}", *cells), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory))
        for implementation in ("native", "transformers"):
            print(f"load, {implementation}: {measure(Path(directory), implementation)}", flush=True)
    return 0 if exact else 1


def on_ranks(model: FamilyUnderTest, grid: dict[str, object]) -> Parity | None:
    """None where the model cannot be shared so: it has no experts to deal out, or `transformers` computes it."""
    try:
        check_ranks(EngineConfig.model_validate({"parallel": grid}), model.info)
    except ConfigError:
        return None
    with model.on_ranks(**grid):
        return model.batched()


def is_exact(parity: Parity | None) -> bool:
    return parity is None or (not parity.mismatches and parity.max_logprob_difference < TOLERANCE)


def cell(parity: Parity | None) -> str:
    if parity is None:
        return "-"
    return "X" if parity.mismatches else f"{parity.max_logprob_difference:.1e}"


if __name__ == "__main__":
    sys.exit(main())
