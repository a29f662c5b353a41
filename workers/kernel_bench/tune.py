"""The table of tile sizes, `kernels/triton/tiles.json`, measured on the GPU at hand.

For each entry, every candidate runs the work that the entry is for; what does not fit the GPU is passed over, and the
fastest stays. An entry is written as soon as it is known: what was measured is kept, whatever becomes of the rest. A
candidate changes the order in which sums are made, not what is summed: `python -m tests.gpu`
afterwards says whether the results are still right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.kernels import fp8
from quire.kernels.packed import PACKINGS, Packing

from .cases import GROUPS, Run, attention_run, experts_run, linear_run
from .measure import Timer
from .shapes import LayerShape

_ROWS_IN_A_CHAIN = 8  # products


@dataclass(frozen=True, slots=True)
class Job:
    """An entry of the table. `make` gives the work, `candidates` are instances of the entry's kind of tile."""

    group: str  # see `cases.GROUPS`
    entry: str
    candidates: list[Any]
    make: Callable[[], Run]


def jobs(device: torch.device, groups: Sequence[str] = GROUPS) -> list[Job]:
    """One for every entry in the table of tiles for bfloat16 and 8 bits; float32 is not for speed."""
    found = (*_attention_jobs(device), *_row_jobs(device), *_gemm_jobs(device), *_packed_jobs(device))
    return [job for job in found if job.group in groups]


def _attention_jobs(device: torch.device) -> list[Job]:
    from quire.kernels.triton.tiles import AttentionTile

    found = []
    for head_dim, cache, short in itertools.product((64, 128, 256), (torch.bfloat16, fp8.DTYPE), (True, False)):
        shape = LayerShape(32, 8, head_dim, 0, 0)
        lens = [(1, 4096)] * 16 if short else [(4096, 4096)]
        rows = (16,) if short else (64, 128)
        sizes = itertools.product(rows, (16, 32, 64, 128), (4, 8), (2, 3, 4))
        kind = "fp8" if cache == fp8.DTYPE else "bf16"
        found.append(
            Job(
                "attention",
                f"attention.{'short' if short else 'long'}.d{head_dim}.{kind}",
                [AttentionTile(*size) for size in sizes],
                lambda shape=shape, lens=lens, cache=cache: attention_run(  # type: ignore[misc]
                    shape, lens, device, torch.bfloat16, cache, 16
                ),
            )
        )
    return found


def _row_jobs(device: torch.device) -> list[Job]:
    from quire.kernels.triton.tiles import RowTile

    sizes = itertools.product((2, 4, 8, 16), (256, 512, 1024, 2048), (4, 8))
    tiles = [RowTile(*size) for size in sizes if 16 <= size[0] * size[1] // (32 * size[2]) <= 64]  # of a thread
    weights = {"n2048": (1024, 2048), "n4096": (4096, 4096), "n8192": (6144, 4096), "nmore": (28672, 4096)}
    dtype = torch.bfloat16

    def make(size: tuple[int, int]) -> Run:
        # One behind the other, as in a step: each begins to read while the one before it runs.
        runs = [linear_run(1, *size, device, dtype, dtype) for _ in range(_ROWS_IN_A_CHAIN)]
        return lambda: [run() for run in runs]

    return [Job("linear", f"row.{name}.bf16", tiles, partial(make, size)) for name, size in weights.items()]


def _gemm_jobs(device: torch.device) -> list[Job]:
    from quire.kernels.triton.tiles import GemmTile

    found = []
    for rows in (16, 32, 64, 128):
        own = {min(rows, 64), rows}
        sizes = itertools.product(sorted(own), (32, 64, 128), (64, 128, 256), (4, 8), (3, 4))
        tiles = [GemmTile(*size) for size in sizes]
        num_rows = 2048 if rows == 128 else rows
        found.append(
            Job(
                "linear",
                f"weight8.m{rows}.bf16",
                tiles,
                lambda rows=num_rows: linear_run(rows, 28672, 4096, device, torch.bfloat16, torch.int8),  # type: ignore[misc]
            )
        )
        found.append(Job("experts", f"moe.m{rows}.bf16", tiles, partial(_expert_job, num_rows, device, None)))
    return found


def _expert_job(rows: int, device: torch.device, packing: Packing | None) -> Run:
    """So many rows for each of some experts."""
    shape = LayerShape(0, 0, 0, 2048, 768, num_experts=64, experts_per_token=8)
    tokens = rows * shape.num_experts // shape.experts_per_token
    chosen = torch.rand(tokens, shape.num_experts).topk(shape.experts_per_token).indices
    return experts_run(shape, chosen, device, torch.bfloat16, packing)


def _packed_jobs(device: torch.device) -> list[Job]:
    """With weights as AWQ and GPTQ have them, and experts as gpt-oss has them."""
    from quire.kernels.triton.tiles import GemmTile, RowTile

    dtype, packing = torch.bfloat16, PACKINGS["z4_128"]
    row_tiles = [RowTile(*size) for size in itertools.product((16, 32, 64), (128, 256, 512, 1024), (2, 4, 8))]
    found = [Job("linear", "packed.m1", row_tiles, lambda: linear_run(1, 28672, 4096, device, dtype, packing))]
    for rows in (16, 32, 64, 128):
        sizes = itertools.product(sorted({min(rows, 64), rows}), (32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4))
        tiles = [GemmTile(*size) for size in sizes]
        run = partial(linear_run, rows, 28672, 4096, device, dtype, packing)
        found.append(Job("linear", f"packed.m{rows}.bf16", tiles, run))
        of_experts = partial(_expert_job, 2048 if rows == 128 else rows, device, PACKINGS["mxfp4"])
        found.append(Job("experts", f"packed_moe.m{rows}.bf16", tiles, of_experts))
    return found


def run(todo: list[Job], device: torch.device, min_s: float, on_job: Callable[[str], None]) -> tuple[Path, list[str]]:
    """Measure all candidates and write the fastest to the section of this GPU. Returns the path of the table, and the
    entries for which no candidate works, which stay as they were."""
    import triton

    from quire.kernels.triton import tiles

    timer = Timer(device, min_s)
    where = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}"
    without = []
    for job in todo:
        on_job(job.entry)
        fastest = fastest_of(job, lambda work: seconds_or_inf(timer, work))
        if fastest is None:
            without.append(job.entry)
        else:
            tiles.write_section(tiles.device_class(device), {job.entry: fastest}, where)
    return tiles.PATH, without


def fastest_of(job: Job, seconds: Callable[[Run], float]) -> Any:
    """The candidate with which the work takes the least time; None where none works."""
    from quire.kernels.triton import tiles

    work = job.make()
    times = {}
    for tile in job.candidates:
        with tiles.overridden(job.entry, tile):
            times[tile] = seconds(work)
    fastest = min(times, key=lambda tile: times[tile])
    return fastest if math.isfinite(times[fastest]) else None


def seconds_or_inf(timer: Timer, work: Run) -> float:
    """The time of a run; infinity where its tiles need more registers or shared memory than there are, or the compiler
    or the assembler fails on them."""
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return timer.seconds(work)
    except (OutOfResources, PTXASError):
        return math.inf
    except RuntimeError as error:
        if "PassManager" in str(error):
            return math.inf
        raise
