"""A graph (`graph`) of a forward of any number of rows: recorded with some, repeated with as many as a step has.

Prompts come in many lengths, and a graph for each would never be used again. But what a forward calls for 200 tokens
and for 300 differs in little: in numbers among the arguments, which the calls name (`recording.Rows`), in how many rows
of their tensors operators take, and in the plans of attention, which are made anew in each step anyway. So all memory
has room for the most rows, and a step uses the first of it:

    recorded with 3 rows         # # # . . . . . . . . .        memory for 12
    repeated with 7              # # # # # # # . . . . .

What this cannot tell is refused: calls that are for one number of rows, a dimension other than the first that may be
the number of rows, and that number among the arguments of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from torch import Tensor

from .graph import Pool, Recorder
from .program import Program
from .recording import CompiledCall, NotCapturableError, borrowed, recorded_by

_MULTIPLE = 16  # of rows that some calls read together


class AnyRows:
    """What was recorded. Nobody else may use its memory while it runs."""

    def __init__(
        self,
        actions: Sequence[Callable[[int], object]],
        results: tuple[Tensor, ...],
        pool: Pool,
        least_rows: int,
        most_rows: int,
    ) -> None:
        """`results` are what the first run gave, in memory for `most_rows`."""
        self.least_rows, self.most_rows = least_rows, most_rows
        self._actions = actions
        self._kept = results, pool
        self._results = [borrowed(result, most_rows) for result in results]

    def replay(self, num_rows: int) -> tuple[Tensor, ...]:
        """With the first `num_rows` rows, `least_rows` to `most_rows`, of the inputs. The results are overwritten by
        the next replay."""
        for action in self._actions:
            action(num_rows)
        return tuple(result[:num_rows] for result in self._results)


def capture(
    run: Callable[[], tuple[Tensor, ...]], pool: Pool, num_rows: int, most_rows: int, inputs: Sequence[Tensor]
) -> tuple[AnyRows, tuple[Tensor, ...]]:
    """Call `run`, which computes `num_rows` rows and is done when this returns, and record it.

    inputs: memory that it reads by rows, with room for `most_rows`.
    Returns the record, and what `run` gave. Raises `NotCapturableError`.
    """
    listener = _Recorder(pool, num_rows, most_rows, inputs)
    with listener, recorded_by(listener):
        results = run()
    actions = listener.finish_with(results)
    return AnyRows(actions, results, pool, listener.least_rows, listener.fitting_rows), results


class _Recorder(Recorder):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self, pool: Pool, num_rows: int, most_rows: int, inputs: Sequence[Tensor]) -> None:
        super().__init__(pool)
        self.most_rows = self._most_rows = most_rows
        self._growth = Fraction(-(-most_rows // _MULTIPLE) * _MULTIPLE, num_rows)
        self.least_rows, self.fitting_rows = 1, most_rows  # of how many its calls are the ones to be made
        self._num_rows = num_rows
        self._memory_by_rows = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._lent |= self._memory_by_rows
        self._by_rows: dict[int, Tensor] = {}  # tensors of `most_rows` rows, by id

    def add_call(self, call: CompiledCall) -> None:
        if call.rows is None:
            raise NotCapturableError("a compiled call is for one number of rows")
        self.least_rows = max(self.least_rows, call.least_rows)
        self.fitting_rows = min(self.fitting_rows, call.most_rows)
        super().add_call(call)

    def add_preparation(self, action: Callable[[], object]) -> None:
        super().add_preparation(partial(_without_rows, action))

    def add_action(self, action: Callable[..., object]) -> None:
        if not isinstance(action, partial):
            raise NotCapturableError(f"{action} may depend on the number of rows")
        self._check([*action.args, *action.keywords.values()])
        super().add_action(partial(self._act, action))

    def finish_with(self, results: Sequence[Tensor]) -> list[Callable[..., object]]:
        for result in results:
            if result.untyped_storage().data_ptr() not in self._memory_by_rows or len(result) != self._num_rows:
                raise NotCapturableError(f"a result, {tuple(result.shape)}, is not by rows")
        preparations, actions = self.finish()
        return preparations + actions

    def _compiled(self, operator: partial[object]) -> CompiledCall | None:
        self._check([*operator.args, *operator.keywords.values()])
        if not all(id(each) in self._by_rows for each in operator.args if isinstance(each, Tensor)):
            return None
        return super()._compiled(
            partial(operator.func, *self._first(operator.args, self._num_rows), **operator.keywords)
        )

    def _act(self, action: partial[object], num_rows: int) -> None:
        keywords = {name: self._first(value, num_rows) for name, value in action.keywords.items()}
        action.func(*self._first(action.args, num_rows), **keywords)

    def _run_program(self, program: Program) -> Callable[..., object]:
        return program.run_for

    def _first(self, value: Any, num_rows: int) -> Any:
        """The same with the first rows of tensors that are by rows."""
        if isinstance(value, Tensor):
            return value[:num_rows] if id(value) in self._by_rows else value
        if type(value) in (tuple, list):
            return type(value)(self._first(each, num_rows) for each in value)
        return {key: self._first(each, num_rows) for key, each in value.items()} if type(value) is dict else value

    def _check(self, value: Any) -> None:
        if isinstance(value, tuple | list | dict):
            for each in value.values() if isinstance(value, dict) else value:
                self._check(each)
        elif isinstance(value, Tensor):
            if id(value) not in self._by_rows and self._num_rows in value.shape:
                raise NotCapturableError(f"a tensor of {tuple(value.shape)} may be by rows")
        elif type(value) is int and value == self._num_rows:
            raise NotCapturableError("an operator is told the number of rows")

    def _lend(self, like: Tensor) -> Tensor:
        lent = self._keep(self._pool.like(like, self._growth))
        if like.shape[:1] == (self._num_rows,):
            self._memory_by_rows.add(lent.untyped_storage().data_ptr())
        else:  # it may be memory that was by rows before
            self._memory_by_rows.discard(lent.untyped_storage().data_ptr())
        return lent

    def _as_recorded(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if tensor.numel() == 0 or memory not in self._lent:
            return tensor
        first, *others = tensor.shape or (1,)
        is_by_rows = first == self._num_rows
        if (
            (memory in self._memory_by_rows) != is_by_rows
            or self._num_rows in others
            or (not is_by_rows and first % self._num_rows == 0)
        ):
            raise NotCapturableError(f"a tensor of {tuple(tensor.shape)} has rows elsewhere")
        if not is_by_rows:
            return borrowed(tensor)
        whole = borrowed(tensor, self._most_rows)
        self._by_rows[id(whole)] = whole
        return whole


def _without_rows(action: Callable[[], object], num_rows: int) -> None:  # noqa: ARG001 (others read it)
    action()
