"""The outputs of a step as payloads that fit into frames: one almost always, several where much is told at once."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.outputs import EngineOutput, Refusal

from . import transport
from .messages import StepOutputs, encoder


def pack_outputs(outputs: Sequence[EngineOutput]) -> tuple[list[bytes], list[str]]:
    """The payloads, in order, and the ids of requests with an output that no frame holds: it became their error."""
    payload = encoder.encode(StepOutputs(list(outputs)))
    if len(payload) <= transport.MAX_FRAME_BYTES:
        return [payload], []
    if len(outputs) == 1:
        return [encoder.encode(StepOutputs([_too_large(outputs[0], len(payload))]))], [outputs[0].request_id]
    middle = len(outputs) // 2
    first, first_ids = pack_outputs(outputs[:middle])
    second, second_ids = pack_outputs(outputs[middle:])
    return first + second, first_ids + second_ids


def _too_large(output: EngineOutput, num_bytes: int) -> EngineOutput:
    """The end of a request, said in place of an output."""
    message = f"{num_bytes} bytes of output in one step are more than the {transport.MAX_FRAME_BYTES} that can be sent"
    refusal = None
    if output.prompt_logprobs is not None:
        message = f"prompt_logprobs: {message}. Ask for fewer of them, or for those of a shorter prompt"
        refusal = Refusal("prompt_logprobs")
    return EngineOutput(
        output.request_id,
        output.first_index,
        [],
        "error",
        error=f"{message}.",
        report=output.report,
        refusal=refusal,
    )
