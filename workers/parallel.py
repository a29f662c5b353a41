"""Ranks and the collectives between them. A `ParallelContext` is passed to whoever needs one; there is no global."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from quire.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one engine meet. `generation` grows by one each time they meet again."""

    address: str  # of the node of rank 0
    port: int  # of its store, from `host_store`
    generation: int = 0


class ParallelContext:
    """The ranks that share every layer of a model, seen from one of them.

    With one rank every collective returns its argument. With more, each call must be made by all ranks in the same
    order, and a peer's death raises `RuntimeError` (gloo: within milliseconds).
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        if world_size > 1 and group is None:
            raise ValueError(f"{world_size} ranks need a process group")
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks. Overwrites `tensor` and returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, in rank order, joined at the last dimension. All must have the same shape."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self._group)
        return torch.cat(parts, dim=-1)

    def split(self, size: int) -> range:
        """This rank's part of `size` things: contiguous, and at most one more than any other's."""
        return split_range(size, self.rank, self.world_size)

    def close(self) -> None:
        """Leave the group, so that this process can join the next generation. Harmless when called twice."""
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()


def planned_rank(rank: int, world_size: int) -> ParallelContext:
    """A rank of a model that is built to be looked at and never run: it has no peers."""
    context = ParallelContext()
    context.rank, context.world_size = rank, world_size
    return context


def split_range(size: int, rank: int, world_size: int) -> range:
    """Part `rank` of `size` things cut in `world_size` contiguous parts; the first `size % world_size` have one more.

    9 things over 2 ranks: 0-4 and 5-8.
    """
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def host_store(address: str, world_size: int) -> TCPStore:
    """Rank 0 opens the store that the ranks of one engine meet in, on a free port (`store.port`), without waiting.

    It lives as long as the returned object, over all generations.
    """
    return TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False)


def join(
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    *,
    local_address: str,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    store: TCPStore | None = None,
) -> ParallelContext:
    """Meet the other ranks of `rendezvous.generation`; returns when all are there.

    `store` is the one this process hosts; the other ranks connect to it. `timeout_s` bounds the meeting and each
    collective. `local_address` is this node's: gloo would otherwise bind what the host name resolves to, often the
    loopback. Raises `torch.distributed.DistError` or `RuntimeError` when a rank does not come.
    """
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(local_address))
    if store is None:
        store = TCPStore(rendezvous.address, rendezvous.port, world_size, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"gen{rendezvous.generation}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return ParallelContext(rank, world_size, dist.group.WORLD)


def interface_of(address: str) -> str:
    """The name of the network interface that has an IPv4 address. Raises `ConfigError` when none has."""
    import fcntl

    get_interface_address = 0x8915  # SIOCGIFADDR, see netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), get_interface_address, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise ConfigError(f"address: {address} belongs to no network interface of this node.")
