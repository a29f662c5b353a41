"""Where the ranks of an engine go: a pure plan, a pure explanation of why it does not fit, and thin calls to Ray."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from quire.engine.errors import ExecutorError

logger = logging.getLogger(__name__)

CPU_PER_RANK = 0.5  # logical: a small machine must be able to hold two ranks, the gateways and the engine


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """One bundle of resources per rank, in rank order. STRICT_PACK keeps them on one node."""

    bundles: tuple[dict[str, float], ...]
    strategy: str = "STRICT_PACK"

    @property
    def total(self) -> dict[str, float]:
        names = sorted({name for bundle in self.bundles for name in bundle})
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in names}


def node_address() -> str:
    """The address by which other nodes reach this one."""
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def plan_ranks(world_size: int, *, on_gpu: bool) -> PlacementPlan:
    """Tensor-parallel ranks: all on one node, one GPU each where the model runs on GPUs."""
    bundle = {"CPU": CPU_PER_RANK, "GPU": 1.0} if on_gpu else {"CPU": CPU_PER_RANK}
    return PlacementPlan((bundle,) * world_size)


def explain_shortage(plan: PlacementPlan, nodes: Sequence[Mapping[str, float]]) -> str:
    """Why a plan that needs one node is not placed: what the best node lacks of its total, or that it is in use.

    `nodes` holds the total resources of each live node.
    """
    needed = plan.total
    asked = _amounts(needed)
    if any(_fits(plan, node) for node in nodes):
        return f"{asked} on one node are needed; a node has that much, but it is in use."
    there = "; ".join(_amounts({name: node.get(name, 0.0) for name in needed}) for node in nodes) or "no node"
    return f"{asked} on one node are needed, and no node has that: there is {there}."


def _fits(plan: PlacementPlan, node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in plan.total.items())


def _live_nodes() -> list[Mapping[str, float]]:
    """The total resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def reserve(plan: PlacementPlan, timeout_s: float, *, can_grow: bool = True) -> PlacementGroup:
    """The placement group of a plan. Raises `ExecutorError`, leaving nothing behind, if it is not there in time.

    A cluster that cannot grow is not waited for when no node of it is large enough.
    """
    if not any(_fits(plan, node) for node in _live_nodes()):
        shortage = explain_shortage(plan, _live_nodes())
        if not can_grow:
            raise ExecutorError(f"The ranks have no place: {shortage}")
        logger.warning("The ranks wait up to %g s for a node to join: %s", timeout_s, shortage)
    group: PlacementGroup = placement_group([dict(bundle) for bundle in plan.bundles], strategy=plan.strategy)
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except GetTimeoutError as error:
        raise ExecutorError(
            f"The ranks found no place within {timeout_s:g} s: {explain_shortage(plan, _live_nodes())}"
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
