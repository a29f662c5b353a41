"""Where the ranks of an engine go: a pure plan, a pure explanation of why it does not fit, and thin calls to Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import runpy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import ray
from ray.exceptions import GetTimeoutError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from quire.engine.config import ParallelConfig
from quire.engine.errors import ExecutorError

logger = logging.getLogger(__name__)

CPU_PER_RANK = 0.5  # logical: a small machine must be able to hold two ranks, the gateways and the engine


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """One bundle of resources per pipeline stage. A bundle is never split, so the ranks of a stage share a node.

    `strategy` is Ray's: whether the bundles are spread over nodes where possible (SPREAD) or in any case
    (STRICT_SPREAD), or lie on as few as possible (PACK).
    """

    bundles: tuple[dict[str, float], ...]
    strategy: str = "PACK"


def auto_device(world_size: int) -> Literal["cpu", "cuda"]:
    """`device: auto` for all ranks of an engine alike, before one of them starts: cuda where Ray counts a GPU for each
    and, on one machine, torch is built for them."""
    num_gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0  # type: ignore[no-untyped-call]
    return _device_for(num_gpus, world_size, len(live_nodes()) if num_gpus else 0)


@cache
def _device_for(num_gpus: float, world_size: int, num_nodes: int) -> Literal["cpu", "cuda"]:
    """Said once where there are GPUs."""
    if num_gpus == 0:
        return "cpu"
    if num_gpus < world_size:
        logger.warning("device: auto takes the CPU: %d ranks need a GPU each, and Ray has %g.", world_size, num_gpus)
        return "cpu"
    cuda = torch_cuda()
    if cuda is None and num_nodes == 1:  # of other nodes' torch nobody here knows
        logger.warning("device: auto takes the CPU: Ray has %g GPU, but torch is a build for CPUs.", num_gpus)
        return "cpu"
    logger.info("device: auto takes the GPU: Ray has %g, and torch here is a build for %s.", num_gpus, cuda or "CPUs")
    return "cuda"


def torch_cuda() -> str | None:
    """The version of CUDA, or of ROCm, that torch is built for. Torch itself is not imported, for seconds and hundreds
    of megabytes that a process which computes nothing has no use for."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    version = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    cuda: str | None = version["cuda"] or version.get("hip")
    return cuda


def node_address() -> str:
    """The address by which other nodes reach this one."""
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def rank_resources(*, on_gpu: bool) -> dict[str, float]:
    """What one rank takes of a node: a GPU where the model runs on GPUs."""
    return {"CPU": CPU_PER_RANK, "GPU": 1.0} if on_gpu else {"CPU": CPU_PER_RANK}


def plan_ranks(config: ParallelConfig, *, on_gpu: bool) -> PlacementPlan:
    """The tensor-parallel ranks of a stage together, the stages as the configuration says."""
    size = config.tensor_parallel_size
    bundle = {name: size * amount for name, amount in rank_resources(on_gpu=on_gpu).items()}
    strategy = config.stage_placement.upper() if config.pipeline_parallel_size > 1 else "PACK"
    return PlacementPlan((bundle,) * config.pipeline_parallel_size, strategy)


def explain_shortage(plan: PlacementPlan, nodes: Sequence[Mapping[str, float]]) -> str:
    """Why a plan is not placed: what the nodes have of what a bundle needs, or that it is in use.

    `nodes` holds the total resources of each live node.
    """
    needed, count = plan.bundles[0], len(plan.bundles)
    asked = f"{_amounts(needed)} on one node are needed"
    if count > 1:
        asked += f", {count} times" + (", each on a node of its own" if plan.strategy == "STRICT_SPREAD" else "")
    if fits(plan, nodes):
        return f"{asked}; {'a node has' if count == 1 else 'there is'} that much, but it is in use."
    there = "; ".join(_amounts({name: node.get(name, 0.0) for name in needed}) for node in nodes) or "no node"
    return f"{asked}, and {'no node has that' if count == 1 else 'the nodes do not have that'}: there is {there}."


def fits(plan: PlacementPlan, nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether empty nodes could hold the bundles, which are all equal."""
    bundle = plan.bundles[0]
    held = [int(min(node.get(name, 0.0) // amount for name, amount in bundle.items())) for node in nodes]
    if plan.strategy == "STRICT_SPREAD":
        held = [min(1, count) for count in held]
    return sum(held) >= len(plan.bundles)


def take(plan: PlacementPlan, free: Sequence[MutableMapping[str, float]]) -> bool:
    """Put the bundles on the first nodes that have room for them left, and take that room away; False if there is none
    for one of them."""
    used: set[int] = set()
    for bundle in plan.bundles:
        for index, node in enumerate(free):
            is_open = plan.strategy != "STRICT_SPREAD" or index not in used
            if is_open and all(node.get(name, 0.0) >= amount for name, amount in bundle.items()):
                break
        else:
            return False
        used.add(index)
        node.update({name: round(node[name] - amount, 4) for name, amount in bundle.items()})  # as exact as Ray is
    return True


def live_nodes() -> list[Mapping[str, float]]:
    """The total resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def reserve(plan: PlacementPlan, timeout_s: float, *, can_grow: bool = True) -> PlacementGroup:
    """The placement group of a plan. Raises `ExecutorError`, leaving nothing behind, if it is not there in time.

    A cluster that cannot grow is not waited for when its nodes are too small or too few.
    """
    if not fits(plan, live_nodes()):
        shortage = explain_shortage(plan, live_nodes())
        if not can_grow:
            raise ExecutorError(f"The ranks have no place: {shortage}")
        logger.warning("The ranks wait up to %g s for a node to join: %s", timeout_s, shortage)
    group: PlacementGroup = placement_group([dict(bundle) for bundle in plan.bundles], strategy=plan.strategy)
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except GetTimeoutError as error:
        raise ExecutorError(
            f"The ranks found no place within {timeout_s:g} s: {explain_shortage(plan, live_nodes())}"
        ) from _released(group, error)
    except BaseException as error:
        raise _released(group, error) from None
    return group


def _released(group: PlacementGroup, error: BaseException) -> BaseException:
    release(group)
    return error


def release(group: PlacementGroup) -> None:
    """Give the resources back. Harmless when the cluster is gone."""
    with contextlib.suppress(ValueError, ray.exceptions.RaySystemError):
        if ray.is_initialized():
            remove_placement_group(group)
