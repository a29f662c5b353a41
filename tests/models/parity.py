"""`python -m tests.models.parity`: every family, and models computed through the fallback, against `transformers`.

A table. Exits with 1 on a mismatch.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does for the modules of this folder

from family_parity import FamilyUnderTest
from tiny_fallbacks import TINY_FALLBACKS
from tiny_families import TINY_FAMILIES

TOLERANCE = 1e-4
ROW = "{:<22} {:<24} {:>7} {:>10} {:>5} {:>20}"


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(ROW.format("model", "architecture", "tokens", "mismatches", "ties", "max logprob diff."))
    exact = True
    fallbacks = {f"{name} (fallback)": family for name, family in TINY_FALLBACKS.items()}
    for name, family in {**TINY_FAMILIES, **fallbacks}.items():
        with tempfile.TemporaryDirectory() as directory:
            model = FamilyUnderTest(family, Path(directory))
            parities = [*(model.compare(answers) for answers in model.modes().values()), model.preempted()]
            model.executor.shutdown()
        mismatches = sum(len(parity.mismatches) for parity in parities)
        difference = max(parity.max_logprob_difference for parity in parities)
        exact &= mismatches == 0 and difference < TOLERANCE
        tokens, ties = sum(parity.num_tokens for parity in parities), sum(parity.num_ties for parity in parities)
        print(ROW.format(name, family.architecture, tokens, mismatches, ties, f"{difference:.1e}"), flush=True)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
