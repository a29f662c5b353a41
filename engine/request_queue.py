"""Requests that wait for a row, and whose turn it is.

    priority class     the smaller number first (policy "priority"; with "fcfs" there is one class)
      preempted        those that lost their row come first, in order of arrival
      tenant           whoever was served least, relative to its weight
        deadline       the least slack first; requests without a deadline come after those with one
          arrival      first come, first served

Sharing among tenants follows the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): each tenant has a counter of the tokens that it was served, a prompt token counting 1 and an output token
2, divided by its weight; the tenant with the smallest counter is next; a tenant that joins starts at the smallest
counter of those that are there, so that nobody saves up credit while idle. A tenant that floods the queue waits
behind itself.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Iterator

from .request import Request, RequestStatus
from .wait_ledger import QueueClock, WaitCause

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
_MAX_IDLE_TENANTS = 4096


class Tenant:
    """What one tenant was served, and the clock of its waiting requests."""

    __slots__ = ("clock", "is_ranked", "name", "num_unfinished", "num_waiting", "serial", "served", "weight")

    def __init__(self, name: str, serial: int, weight: float, served: float, now: float) -> None:
        self.name = name
        self.serial = serial  # no other one has it, also of the same name: one that was forgotten, and is there again
        self.weight = weight
        self.served = served  # virtual tokens
        self.num_unfinished = 0
        self.num_waiting = 0
        self.is_ranked = False  # it has an entry in the heap of its `TenantBook`
        self.clock = QueueClock(now)

    def charge(self, cost: float) -> None:
        self.served += cost / self.weight


class TenantBook:
    """All tenants that have unfinished requests, and some that had."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._serials = itertools.count()
        # Heap of (served when entered, name, serial, tenant), one entry for each tenant that has unfinished requests,
        # and for some that had. Counters only grow: an entry that is out of date is put right when it comes to the top.
        self._ranks: list[tuple[float, str, int, Tenant]] = []

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def arrive(self, name: str, weight: float, now: float) -> Tenant:
        """A request of this tenant has come. Its weight is the last one given."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_IDLE_TENANTS:
                self._tenants = {key: each for key, each in self._tenants.items() if each.num_unfinished}
            tenant = self._tenants[name] = Tenant(name, next(self._serials), weight, 0.0, now)
        tenant.weight = weight
        if tenant.num_unfinished == 0:
            tenant.served = max(tenant.served, self._least_served())
            if not tenant.is_ranked:
                tenant.is_ranked = True
                heapq.heappush(self._ranks, (tenant.served, name, tenant.serial, tenant))
        tenant.num_unfinished += 1
        return tenant

    def _least_served(self) -> float:
        """The smallest counter of the tenants that are there; 0 when there is none."""
        while self._ranks:
            served, name, serial, tenant = self._ranks[0]
            if tenant.num_unfinished == 0:
                heapq.heappop(self._ranks)
                tenant.is_ranked = False
            elif served != tenant.served:
                heapq.heapreplace(self._ranks, (tenant.served, name, serial, tenant))
            else:
                return served
        return 0.0

    def leave(self, name: str) -> None:
        """A request of this tenant has ended."""
        self._tenants[name].num_unfinished -= 1


class _TenantLine:
    """The waiting requests of one tenant in one priority class."""

    __slots__ = ("heap", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.heap: list[tuple[float, int, Request]] = []  # (deadline, arrival_index, request)


class _PriorityClass:
    __slots__ = ("lines", "preempted", "turns")

    def __init__(self) -> None:
        self.preempted: list[tuple[int, Request]] = []  # heap by arrival
        self.lines: dict[str, _TenantLine] = {}
        # Heap of (served when entered, tenant, its serial, line). A counter only grows, so an entry that is out of date
        # is too early, never too late: it is put right when it comes to the top.
        self.turns: list[tuple[float, str, int, _TenantLine]] = []


class RequestQueue:
    """The order above. A push or pop costs O(log n), a removal O(1): removed entries are skipped at the top.

    Requests of tenants other than the next one's are billed TENANT_SHARE, all others what `stand_still` says.
    """

    def __init__(self, tenants: TenantBook) -> None:
        self._tenants = tenants
        self._members: dict[str, Request] = {}
        self._classes: dict[int, _PriorityClass] = {}
        self._priorities: list[int] = []
        self._num_entries = 0
        self._next: Tenant | None = None  # the tenant whose clock shows what the queue really waits for
        self._fresh: list[Tenant] = []  # whose clocks do not show yet that others are before them

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def push(self, request: Request, now: float) -> None:
        """Let a request wait: at the front of its class if it lost its row, else in its tenant's line."""
        tenant = self._tenants[request.tenant]
        if tenant.num_waiting == 0:
            tenant.clock.turn(WaitCause.TOKEN_BUDGET, now)
            self._fresh.append(tenant)
        tenant.num_waiting += 1
        self._members[request.request_id] = request
        self._enter(request, tenant)
        request.ledger.join(tenant.clock, now)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Its ledger still runs on the queue's clock."""
        del self._members[request.request_id]
        self._tenants[request.tenant].num_waiting -= 1
        if self._num_entries > 64 and self._num_entries > 4 * len(self._members):
            self._rebuild()

    def peek(self) -> Request | None:
        """The next request, left in place."""
        while self._priorities:
            group = self._classes[self._priorities[0]]
            request = self._peek_preempted(group) or self._peek_line(group)
            if request is not None:
                return request
            del self._classes[self._priorities.pop(0)]
        return None

    def stand_still(self, cause: WaitCause, now: float) -> None:
        """Whoever waits now waits for `cause`, or for its tenant's turn."""
        head = self.peek()
        if head is None:
            return
        following = self._tenants[head.tenant]
        if self._next is not None and self._next is not following:
            self._next.clock.turn(WaitCause.TENANT_SHARE, now)
        for tenant in self._fresh:
            if tenant is not following:
                tenant.clock.turn(WaitCause.TENANT_SHARE, now)
        self._fresh.clear()
        if following.clock.cause is not cause:
            following.clock.turn(cause, now)
        self._next = following

    def all_stand_still(self, cause: WaitCause, now: float) -> None:
        """Whoever waits now waits for `cause`, whosever turn it is, until the next `stand_still`."""
        self._fresh = [tenant for tenant in self._tenants if tenant.num_waiting]
        self._next = None
        for tenant in self._fresh:
            tenant.clock.turn(cause, now)

    def _enter(self, request: Request, tenant: Tenant) -> None:
        group = self._classes.get(request.priority)
        if group is None:
            group = self._classes[request.priority] = _PriorityClass()
            insort(self._priorities, request.priority)
        self._num_entries += 1
        if request.status is RequestStatus.PREEMPTED:
            heapq.heappush(group.preempted, (request.arrival_index, request))
            return
        line = group.lines.get(tenant.name)
        if line is None or line.tenant is not tenant:
            line = group.lines[tenant.name] = _TenantLine(tenant)
            heapq.heappush(group.turns, (tenant.served, tenant.name, tenant.serial, line))
        deadline = math.inf if request.deadline is None else request.deadline
        heapq.heappush(line.heap, (deadline, request.arrival_index, request))

    def _peek_preempted(self, group: _PriorityClass) -> Request | None:
        while group.preempted:
            request = group.preempted[0][1]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(group.preempted)
            self._num_entries -= 1
        return None

    def _peek_line(self, group: _PriorityClass) -> Request | None:
        while group.turns:
            served, name, serial, line = group.turns[0]
            heap = line.heap
            while heap and self._members.get(heap[0][2].request_id) is not heap[0][2]:
                heapq.heappop(heap)
                self._num_entries -= 1
            if not heap:
                heapq.heappop(group.turns)
                if group.lines.get(name) is line:
                    del group.lines[name]
            elif served != line.tenant.served:
                heapq.heapreplace(group.turns, (line.tenant.served, name, serial, line))
            else:
                return heap[0][2]
        return None

    def _rebuild(self) -> None:
        """Drop the entries of requests that were removed."""
        self._classes.clear()
        self._priorities.clear()
        self._num_entries = 0
        for request in self._members.values():
            self._enter(request, self._tenants[request.tenant])
