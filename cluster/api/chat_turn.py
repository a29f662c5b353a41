"""From a conversation to a generation at work: what chat completions and responses have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from .answer_grammar import answer_grammar
from .backend import ServedModel
from .beam_search import generation_of
from .chat_prompt import ChatPrompt, chat_prompt
from .chat_reading import Reading, reading_of
from .context import ApiContext, check_choices, off_the_loop
from .deadline import Deadline
from .generation import Generation, find_model, options_of
from .protocol import ChatCompletionRequest
from .resume import Begun, may_resume
from .sse import unless_client_leaves
from .tenants import tenant_of


class ChatTurn(NamedTuple):
    """The next message of a conversation: who writes it, and how its text is read."""

    served: ServedModel
    prompt: ChatPrompt
    reading: Reading
    begun: Begun
    generation: Generation


async def begin_turn(
    http: Request,
    context: ApiContext,
    request: ChatCompletionRequest,
    body: bytes,
    prefix: str,
    check: Callable[[Reading], None] | None = None,
) -> ChatTurn:
    """Everything up to the first token. `prefix` is that of the answer's id; `check` may refuse how answers are read.

    Raises `InvalidRequestError`, and what the backend raises."""
    deadline = Deadline(request.deadline_ms)
    served = await deadline.hold(find_model(context.backend, request.model))
    check_choices(1, request.n, context.limits)
    metrics = context.metrics.start(served.name, request.n or 1)
    prompt = await unless_client_leaves(http.receive, deadline.hold(chat_prompt(context, served, request, body)))
    reading = reading_of(served, request, prompt)
    if check is not None:
        check(reading)
    token_ids = prompt.token_ids
    room = served.input_processor.room_after(token_ids, "messages")
    params = request.sampling_params(served.info.generation_defaults, room)
    answer_id, engine_id = request.ids(prefix)
    tenant = tenant_of(http.scope)
    options = options_of(request, served, tenant)
    grammar = await off_the_loop(body, lambda: answer_grammar(reading, options.grammar, served.grammar_limits))
    options = msgspec.structs.replace(options, grammar=grammar)
    requests = served.input_processor.process(engine_id, token_ids, params, param="messages", options=options)
    begun = Begun([requests], answer_id, int(time.time()))
    if request.stream:
        begun = await deadline.hold(may_resume(begun, http, body, context.backend, served.name))
    generation = generation_of(context, served, begun, metrics, request, tenant, deadline, marks=reading.mark_ids)
    return ChatTurn(served, prompt, reading, begun, generation)
