"""Does the suite notice? Each fault below is put into a copy of the engine, and the engine's tests must fail on it."""

# ruff: noqa: E501 - a fault is a line, and the lines that it changes are as long as they are

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

UNIT = Path(__file__).parent
ENGINE = UNIT.parent.parent / "engine"
MAX_CPU_S = 90  # several times what the suite takes
TESTS = (  # the quickest first
    "test_block_pool.py",
    "test_kv_cache_manager.py",
    "test_cache_history.py",
    "test_step_share.py",
    "test_admission.py",
    "test_core.py",
    "test_speculation.py",
    "test_draft_gain.py",
)

# What is wrong, file, what stands there, what is put in its place.
FAULTS = [
    ("full hit computes nothing", "kv_cache_manager.py", "request.max_cached_tokens // self.block_size\n        hashes", "(request.max_cached_tokens + 1) // self.block_size\n        hashes"),
    ("partly filled block is cached", "kv_cache_manager.py", "num_final_tokens // self.block_size", "-(-num_final_tokens // self.block_size)"),
    ("blocks released from the front", "kv_cache_manager.py", "self.pool.release(reversed(table[row]))", "self.pool.release(table[row])"),
    ("salt is ignored", "kv_cache_manager.py", "group_scope(request.scope, group)", "group_scope(bytes(16), group)"),
    ("window one too short", "kv_cache_groups.py", "num_computed_tokens - self._window + 1", "num_computed_tokens - self._window + 2"),
    ("missed decref", "block_pool.py", "count = self.ref_count[block_id] - 1", "count = max(self.ref_count[block_id] - 1, 1)"),
    ("eviction from the wrong end", "block_pool.py", "NULL_BLOCK if self._key[block_id] is not None else self._next[NULL_BLOCK]", "self._next[NULL_BLOCK] if self._key[block_id] is not None else NULL_BLOCK"),
    ("evicted block is still found", "block_pool.py", "                del self._cached[old]\n                key[block_id] = None\n", ""),
    ("acquired block stays free", "block_pool.py", "if self.ref_count[block_id] == 0:", "if False:"),
    ("hash forgets what came before", "block_hash.py", "sha256(parent + array", "sha256(array"),
    ("one block too few", "scheduler.py", "-(-(computed + grants) // self.kv_cache.block_size)", "(computed + grants) // self.kv_cache.block_size"),
    ("budget is not kept", "scheduler.py", "np.maximum(budget - served_before, 0)", "limited"),
    ("token after the last is computed", "scheduler.py", "table.max_total[rows] - 1)", "table.max_total[rows])"),
    ("result goes to the row's next owner", "scheduler.py", "step.samples & (table.epoch[rows] == step.epochs)", "step.samples & (table.epoch[rows] >= 0)"),
    ("cache survives the workers", "scheduler.py", "        self.kv_cache.reset_prefix_cache()\n        self._released_rows = []", "        self._released_rows = []"),
    ("gates are not given back", "scheduler.py", "        self.waiting.leave_gates(request)\n        self.running", "        self.running"),
    ("deadlines are not kept", "scheduler.py", "        self._expire(now)\n", ""),
    ("the first gives way", "running_table.py", "self._order[-1][1]", "self._order[0][1]"),
    ("min_tokens is ignored", "request.py", " and len(self.output_token_ids) > self.source.sampling_params.min_tokens", ""),
    ("preempted ones go to the end", "request_queue.py", "if request.status is RequestStatus.PREEMPTED:", "if False:"),
    ("tenants are not charged", "request_queue.py", "self.served += cost / self.weight", "self.served += 0 * cost"),
    ("weights are ignored", "request_queue.py", "self.served += cost / self.weight", "self.served += cost"),
    ("time is billed twice", "wait_ledger.py", "            self._joined = reading\n", ""),
    ("refused gates keep what was set aside", "waiting_room.py", "            if not passed:\n                self.leave_gates(request, index)\n", "            if not passed:\n"),
    ("newcomers leave no room", "scheduler.py", "reserve = len(self.running) + self._num_blocks_to_come()", "reserve = 0"),
    ("only the first chunk has to fit", "kv_cache_manager.py", "max(max(need, now) + reserve", "max(now + reserve"),
    ("a shortage ends when nothing has come", "shortage.py", "gained < self._num_missing", "gained < 0"),
    ("a shortage lasts whatever comes", "shortage.py", "gained < self._num_missing", "gained >= 0"),
    ("answers cost nothing", "scheduler.py", "charge(OUTPUT_TOKEN_COST * num_new)", "charge(0 * num_new)"),
    ("failures are never forgiven", "scheduler.py", "            request.num_failures = 0\n", ""),
    ("suspects are not computed alone", "scheduler.py", "suspect = self._quarantine.next()", "suspect = None"),
    ("a gate's change of mind is missed", "waiting_room.py", "min(aside.version, version) if aside.requests else version", "version"),
    ("idle time counts as work", "scheduler.py", "            self.waiting.drain_rate.pause()\n", ""),
    ("logprobs of the neighbour", "step_plan.py", "token_ids[1:wanted], values[1:wanted]", "token_ids[1:], values[1:]"),
    ("a row goes on without its last token", "step_share.py", "        return table.num_tokens[rows]\n", "        return table.num_tokens[rows] + table.num_pending[rows]\n"),
    ("a sampled token is not told", "scheduler.py", "            last_token_ids=self._share.last_token_ids(table, rows, samples),\n", ""),
    ("the last token is an old one", "scheduler.py", "        table.last_token_ids[rows[taken]] = result.sampled_token_ids[taken, 0]\n", ""),
    ("one step takes every row", "step_share.py", "np.cumsum(decodes) > most_rows", "np.cumsum(decodes) > num_running"),
    ("one step takes every token", "step_share.py", "max(-(-work // self._num_steps), MIN_STEP_TOKENS)", "budget"),
    ("what is under way does not count", "step_share.py", "self._num_tokens_under_way += num_tokens", "pass"),
    ("what is back still counts", "step_share.py", "self._num_tokens_under_way -= num_tokens", "pass"),
    ("what was lost is still under way", "scheduler.py", "        self._share.reset()\n", ""),
    ("the window is left before it is cached", "scheduler.py", "self.kv_cache.commit(request, self._num_final_tokens(row))\n        while", "while"),
    ("embeddings skip what is cached", "request.py", "            return 0\n        if self.prompt_logprobs", "            return self.num_tokens - 1\n        if self.prompt_logprobs"),
    ("prompt logprobs skip what is cached", "request.py", "return self.prompt_logprobs.next_position - 1", "return self.num_tokens - 1"),
    ("prompt logprobs of a lost row are kept", "step_plan.py", "if epochs_now[self.output.rows[index]] == self.epochs[index]:", "if request is not None and request.prompt_logprobs is not None:"),
    ("prompt logprobs come again after a preemption", "scheduler.py", "None if request.prompt_logprobs is None else request.prompt_logprobs.next_position", "None if request.prompt_logprobs is None else 1"),
    ("prompt logprobs come again after a resume", "request.py", " and not source.resume_token_ids", ""),
    ("tokens follow the end of an answer", "speculation.py", "            if request.finish_reason() is not None:\n                break\n", ""),
    ("drafts reach beyond the last token", "speculation.py", "request.num_tokens_left - num_pending - 1)", "request.num_tokens_left - num_pending)"),
    ("drafts have no blocks", "speculation.py", "room_in_blocks = num_blocks * block_size - num_tokens", "room_in_blocks = MAX_STEP_DRAFTS"),
    ("right drafts are computed again", "speculation.py", "        table.num_computed[row] += len(new) - 1\n", ""),
    ("drafts amid a prompt", "speculation.py", "(plan.grants == 1) & (table.num_computed[rows] + 1 == table.num_tokens[rows])", "plan.grants > 0"),
    ("a row goes on while its drafts are checked", "speculation.py", "        if last.output.drafts is not None:\n            return True\n", ""),
    ("nobody waits for a guess", "speculation.py", "return bool(wanted and", "return bool([] and"),
    ("a step has taken the time of the one beside it", "speculation.py", "begun = step.planned_at if self._known_at is None else self._known_at", "begun = step.planned_at"),
    ("steps have taken the time when nothing was to do", "speculation.py", "        self._known_at = None\n\n", "        pass\n\n"),
    ("a token under way is no guess", "draft_gain.py", "return found[wanted.num_pending :]", "return found"),
    ("drafts take more than the budget", "speculation.py", "min(plan.budget, _NUM_CHEAP - num_tokens)", "_NUM_CHEAP - num_tokens"),
    ("drafts cost nothing", "draft_gain.py", "self.draft_costs.seconds(num_tokens + count, least)", "least"),
    ("a guess behind a wrong one counts", "draft_gain.py", "chance *= self", "chance = self"),
    ("steps are not timed", "scheduler.py", "        self._speculation.learn_step(step, now)\n", ""),
    ("the last token of an embedded prompt is not computed", "request.py", "self.max_total_tokens = len(self.prompt_token_ids) + 1", "self.max_total_tokens = len(self.prompt_token_ids)"),
]  # fmt: skip

NO_FAULT = ("no fault", "scheduler.py", "class Scheduler:", "class Scheduler:")

_FORKING = threading.Lock()  # filelock, which transformers brings, refuses a fork while another thread forks


def run_suite(root: str, output: str, first: str) -> NoReturn:
    """In a forked process, which ends with 0 if the engine's tests pass against the engine in `root`, else with 1.

    first: the file of tests to begin with.
    """
    status = 1
    with open(output, "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log  # instead of what pytest captures
        try:
            status = int(not passes(root, first))
        except BaseException:
            traceback.print_exc()
    os._exit(status)  # how a process that was forked by a thread would end by itself says nothing


def passes(root: str, first: str) -> bool:
    helpers = {path.stem for path in UNIT.glob("*.py")}
    for name in [name for name in sys.modules if name.startswith("quire.engine") or name in helpers]:
        del sys.modules[name]
    import quire

    quire.__path__ = [root]
    vars(quire).pop("engine", None)
    import quire.engine

    quire.engine.__path__.append(str(ENGINE))  # what `root` does not hold
    signal.signal(signal.SIGXCPU, _give_up)  # a fault may make it run for ever
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 10))
    play_workloads(range(20))  # they notice most faults, and at once
    files = [str(UNIT / name) for name in sorted(TESTS, key=lambda name: name != first)]
    if pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *files]) != 0:
        return False
    play_workloads(range(20, 60))
    return True


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done after {MAX_CPU_S} s")


def play_workloads(seeds: range) -> None:
    from workloads import draw, play

    for seed in seeds:
        play(draw(seed))


def suite_passes(root: Path, file: str) -> tuple[bool, str]:
    """Whether it does, and what it printed. file: the one that `root` has a copy of."""
    output = root / "output.txt"
    with _FORKING:
        child = os.fork()
    if child == 0:
        run_suite(str(root), str(output), f"test_{file}")
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0, output.read_text()


def copy_engine(root: Path, file: str) -> Path:
    """An engine in `root` of which one file is a copy; the others are the engine's own, and compiled already."""
    (root / "engine").mkdir()
    for name in ("__init__.py", file):
        shutil.copy(ENGINE / name, root / "engine" / name)
    return root / "engine" / file


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bool, str]]:
    """By fault: whether the suite noticed it, and what it printed. As many at a time as there are cores."""

    def try_fault(fault: tuple[str, str, str, str]) -> tuple[bool, str]:
        what, file, old, new = fault
        root = tmp_path_factory.mktemp("fault")
        path = copy_engine(root, file)
        source = path.read_text()
        assert source.count(old) == 1, f"{what}: {file} does not hold this line once any more, adapt the fault"
        faulty = source.replace(old, new)
        compile(faulty, str(path), "exec")
        path.write_text(faulty)
        passes, output = suite_passes(root, file)
        return not passes, output

    tmp_path_factory.getbasetemp()  # two threads cannot make it at the same time
    faults = [NO_FAULT, *FAULTS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip((fault[0] for fault in faults), pool.map(try_fault, faults), strict=True))


def test_the_copy_without_a_fault_passes(noticed: dict[str, tuple[bool, str]]) -> None:
    found, output = noticed[NO_FAULT[0]]
    assert not found, output[-3000:]


@pytest.mark.parametrize("what", [fault[0] for fault in FAULTS])
def test_the_suite_notices(what: str, noticed: dict[str, tuple[bool, str]]) -> None:
    found, output = noticed[what]
    assert found, f"the fault went unnoticed: {output[-500:]}"
    assert re.search(r"Error\b|FAILED", output), f"ended without saying what is wrong: {output[-500:]}"
