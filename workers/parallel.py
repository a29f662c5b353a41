"""Ranks and the collectives between them. A `ParallelContext` is passed to whoever needs one; there is no global."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from quire.engine.config import ParallelConfig
from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import split_range

# Hidden states on their way to the next stage. It takes them in order, so this many steps may be ahead of it.
_MAX_SENDS = 8


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one engine meet. `generation` grows by one each time they meet again."""

    address: str  # of the node of rank 0
    port: int  # of its store, from `host_store`
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """How the ranks of one engine share a model: those of a stage share its layers, and stages follow each other.

    tensor_size 2, 3 stages:        stage 0      stage 1      stage 2
                                    rank 0 ────▶ rank 2 ────▶ rank 4      tensor rank 0
                                    rank 1 ────▶ rank 3 ────▶ rank 5      tensor rank 1
    """

    tensor_size: int = 1
    num_stages: int = 1
    expert_parallel: bool = False  # the ranks of a stage have whole experts, not a slice of each

    @classmethod
    def of(cls, config: ParallelConfig) -> Grid:
        return cls(config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel)

    @property
    def world_size(self) -> int:
        return self.tensor_size * self.num_stages

    def stage_ranks(self, stage: int) -> list[int]:
        """The ranks of a stage, which meet in its collectives."""
        return list(range(stage * self.tensor_size, (stage + 1) * self.tensor_size))

    def pipeline_ranks(self, tensor_rank: int) -> list[int]:
        """One rank of each stage: hidden states travel along them."""
        return list(range(tensor_rank, self.world_size, self.tensor_size))


class ParallelContext:
    """A place in the grid of ranks, and the way to the others.

    With one rank per stage every collective returns its argument. With more, each call must be made by all ranks of the
    stage in the same order, and a peer's death raises `RuntimeError` (gloo: within milliseconds).
    """

    def __init__(
        self,
        rank: int = 0,
        grid: Grid = Grid(),  # frozen
        tensor_group: dist.ProcessGroup | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
        host_ranks: Sequence[int] | None = None,
    ) -> None:
        """`host_ranks`: those of the grid that share this rank's host, itself among them; all if None."""
        self.grid = grid
        self.rank = rank
        self.host_ranks = range(grid.world_size) if host_ranks is None else host_ranks
        self.stage, self.tensor_rank = divmod(rank, grid.tensor_size)
        self.tensor_size = grid.tensor_size
        self._tensor_group = tensor_group
        self._pipeline_group = pipeline_group
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.grid.num_stages - 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of this stage. Overwrites `tensor` and returns it."""
        if self.tensor_size > 1:
            dist.all_reduce(tensor, group=self._tensor_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of this stage's ranks, in order, joined at the last dimension. All must have the same shape."""
        if self.tensor_size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.tensor_size)]
        dist.all_gather(parts, tensor, group=self._tensor_group)
        return torch.cat(parts, dim=-1)

    def send(self, tensor: Tensor) -> None:
        """Give `tensor` to the next stage, without waiting until it is taken. Nobody may change it afterwards."""
        while len(self._sends) >= _MAX_SENDS:
            work, _ = self._sends.popleft()
            if work is not None:
                work.wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.rank + self.tensor_size, group=self._pipeline_group)
        self._sends.append((work, tensor))  # which must live until it is taken

    @property
    def most_sent_bytes(self) -> int:
        """Of all that is kept until the next stage takes it, beside the last, if the largest step so far is the largest
        of all."""
        return (_MAX_SENDS - 1) * max((tensor.nbytes for _, tensor in self._sends), default=0)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the stage before sends next."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, self.rank - self.tensor_size, group=self._pipeline_group)
        return tensor

    def split(self, size: int) -> range:
        """This rank's part of `size` things: contiguous, and at most one more than any other's of its stage."""
        return split_range(size, self.tensor_rank, self.tensor_size)

    def close(self) -> None:
        """Leave the groups, so that this process can join the next generation. Harmless when called twice."""
        if self._tensor_group is not None or self._pipeline_group is not None:
            self._tensor_group = self._pipeline_group = None
            self._sends.clear()
            dist.destroy_process_group()


def host_store(address: str, world_size: int) -> TCPStore:
    """Rank 0 opens the store that the ranks of one engine meet in, on a free port (`store.port`), without waiting.

    It lives as long as the returned object, over all generations.
    """
    # The store would listen on every interface of the node; a socket that is there already keeps it to one.
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(
    rendezvous: Rendezvous,
    rank: int,
    grid: Grid,
    *,
    local_address: str,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    store: TCPStore | None = None,
) -> ParallelContext:
    """Meet the other ranks of `rendezvous.generation`; returns when all are there.

    `store` is the one this process hosts; the other ranks connect to it. `timeout_s` bounds the meeting and each
    collective. `local_address` is this node's: gloo would otherwise bind what the host name resolves to, often the
    loopback, and NCCL an interface of its own choice. Raises `torch.distributed.DistError` or `RuntimeError` when a
    rank does not come.
    """
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(local_address))
    elif backend == "nccl" and "NCCL_SOCKET_IFNAME" not in os.environ:
        with contextlib.suppress(ConfigError):  # an address of another kind: it chooses for itself then
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(local_address)}"  # without "=", all that begin with it
    if store is None:
        store = TCPStore(rendezvous.address, rendezvous.port, grid.world_size, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"gen{rendezvous.generation}", store),
        rank=rank,
        world_size=grid.world_size,
        timeout=timeout,
    )
    stages = [grid.stage_ranks(stage) for stage in range(grid.num_stages)]
    pipelines = [grid.pipeline_ranks(tensor_rank) for tensor_rank in range(grid.tensor_size)]
    groups = _subgroup(stages, rank, timeout), _subgroup(pipelines, rank, timeout)
    return ParallelContext(
        rank, grid, *groups, find_host_ranks(store, rendezvous, rank, grid.world_size, local_address)
    )


def find_host_ranks(
    store: TCPStore, rendezvous: Rendezvous, rank: int, world_size: int, local_address: str
) -> list[int]:
    """The ranks at this address. All ranks have met, and ask."""
    addresses = PrefixStore(f"addresses{rendezvous.generation}", store)
    addresses.set(str(rank), local_address)
    return [each for each in range(world_size) if addresses.get(str(each)).decode() == local_address]


def _subgroup(groups: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of these that `rank` is in. All ranks make all of them, in the same order."""
    if len(groups) == 1:
        return dist.group.WORLD
    if len(groups[0]) == 1:
        return None
    made: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout) for ranks in groups]
    return made[next(index for index, ranks in enumerate(groups) if rank in ranks)]


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
