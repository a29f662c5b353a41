"""`python -m tests.gpu`: the Triton kernels on the GPU of this machine, against the float32 reference.

Needs torch with CUDA and triton, nothing else: no Ray, no model, no network. Exits with 1 when a check fails and with
2 when there is no GPU.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# A bare machine runs the checkout without installing it.
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "kernels")]


def main() -> int:
    if not torch.cuda.is_available():
        print(f"No GPU: torch {torch.__version__} sees no CUDA device. Nothing was checked.", file=sys.stderr)
        return 2
    import triton
    from triton_checks import run_checks

    print(
        f"{torch.cuda.get_device_name()} · torch {torch.__version__} · triton {triton.__version__}"
        f" · Python {platform.python_version()}"
    )
    results = run_checks("cuda")
    width = max(map(len, results))
    for name, problem in results.items():
        print(f"{name:<{width}}  {problem or 'ok'}")
    failed = sum(problem is not None for problem in results.values())
    print(f"{len(results) - failed} of {len(results)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
