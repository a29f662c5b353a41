"""Many prompts in, all answers out: the engine used in the caller's own thread, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import msgspec

from .beam_search import Beam, BeamSearchParams, beam_search
from .core import EngineCore
from .detokenizer import TokenDecoder
from .errors import EngineError, InvalidRequestError
from .input_processor import InputProcessor
from .interrupts import interrupts_afterwards
from .output_processor import OutputKind, OutputProcessor
from .outputs import EmbeddingOutput, EngineOutput, EngineRequest, RequestOutput
from .pooling import PoolingParams
from .sampling_params import SamplingParams


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt
Message = dict[str, Any]


class OfflineEngine:
    """Runs a core to the end of the prompts given to it. Not thread-safe. Wired up by `quire.LLM`."""

    def __init__(self, core: EngineCore, input_processor: InputProcessor, tokenizer: Any) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._input_processor = input_processor
        self._decoder = TokenDecoder(tokenizer)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer every prompt; the outputs are in the order of the prompts.

        `sampling_params` is one for all prompts, or one for each. Raises `InvalidRequestError`, before anything runs,
        if one of them cannot work. An interrupt aborts what is unfinished and leaves the engine usable.
        """
        if isinstance(prompts, str | dict):
            prompts = [prompts]
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params: {len(sampling_params)} given for {len(prompts)} prompts; give one, or one for each.",
                "sampling_params",
            )
        by_id: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        progress = _Progress(len(prompts), use_tqdm)
        with progress:
            for output in self._run(list(zip(prompts, sampling_params, strict=True)), "final", request_ids):
                by_id[output.request_id] = output
                progress.finished(output)
        return [by_id[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, rendered by the model's chat template."""
        if not messages:
            raise InvalidRequestError("messages: must hold at least one message.", "messages")
        first = messages[0]
        conversations: list[Any] = [messages] if isinstance(first, dict) else list(messages)
        prompts: list[Prompt] = [
            self.render_chat(each, chat_template=chat_template, add_generation_prompt=add_generation_prompt)
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, add_generation_prompt: bool = True
    ) -> TokensPrompt:
        """The tokens of a conversation in the model's chat template (which brings its own special tokens)."""
        text = self.tokenizer.apply_chat_template(
            list(messages), chat_template=chat_template, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        return {"prompt_token_ids": self._input_processor.tokenize(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt piece by piece: each output holds what is new. Closing the iterator aborts."""
        yield from self._run([(prompt, sampling_params or SamplingParams())], "delta", [])

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: PoolingParams | None = None, *, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """The embedding of every prompt, in their order; pooled as the model's files say, unless `pooling` does.

        Raises `InvalidRequestError`, before anything runs, if one of them cannot work.
        """
        if isinstance(prompts, str | dict):
            prompts = [prompts]
        texts = [split_prompt(prompt) for prompt in prompts]
        requests = []
        for _, content in texts:
            requests.append(self._input_processor.process_embedding(str(self._num_requests), content, pooling))
            self._num_requests += 1
        progress = _Progress(len(prompts), use_tqdm)
        ends: dict[str, EngineOutput] = {}
        try:
            for request in requests:
                self.core.add_request(request)
            with progress:
                while len(ends) < len(requests):
                    for output in self._step():
                        ends[output.request_id] = output
                        progress.embedded()
        finally:
            self.core.abort([request.request_id for request in requests])
        return [
            embedding_output(request, text, ends[request.request_id])
            for request, (text, _) in zip(requests, texts, strict=True)
        ]

    def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
        """The `beam_width` best answers of each prompt, the best first."""
        contents = [split_prompt(prompt)[1] for prompt in prompts]
        token_prompts = [self._input_processor.tokenize(each) if isinstance(each, str) else each for each in contents]

        def generate(batch: list[list[int]], one_token: SamplingParams) -> list[RequestOutput]:
            return self.generate([{"prompt_token_ids": ids} for ids in batch], one_token, use_tqdm=False)

        info = self._input_processor.info
        found = beam_search(generate, token_prompts, params, info.eos_token_ids, self.core.max_model_len)
        return [
            [msgspec.structs.replace(beam, text=self._decoder.decode(beam.token_ids)) for beam in beams]
            for beams in found
        ]

    def _run(
        self, work: list[tuple[Prompt, SamplingParams]], kind: OutputKind, request_ids: list[str]
    ) -> Iterator[RequestOutput]:
        """Run `work` to its end. The prompts' request ids are appended to `request_ids`."""
        outputs = OutputProcessor(self._decoder, kind)
        batch = []
        for prompt, params in work:
            request_id = str(self._num_requests)
            self._num_requests += 1
            text, content = split_prompt(prompt)
            batch.append((text, self._input_processor.process(request_id, content, params)))
            request_ids.append(request_id)
        engine_ids: list[str] = []
        try:
            for text, requests in batch:
                outputs.add(text, requests)
                for request in requests:
                    self.core.add_request(request)
                    engine_ids.append(request.request_id)
            while outputs.num_unfinished:
                arrived = self._step()
                raise_refusal(arrived)
                processed = outputs.process(arrived)
                self.core.abort(processed.abort_ids)
                yield from processed.request_outputs
        finally:
            self.core.abort(engine_ids)

    def _step(self) -> list[EngineOutput]:
        with interrupts_afterwards():
            return self.core.step()

    def shutdown(self) -> None:
        self.core.shutdown()


def raise_refusal(outputs: Sequence[EngineOutput]) -> None:
    """Raise the `InvalidRequestError` that one of the outputs holds: found after its request was taken in."""
    for output in outputs:
        if output.refusal is not None:
            raise InvalidRequestError(output.error or "", output.refusal.param, output.refusal.code)


class _Progress:
    """A progress bar over prompts, with tokens per second."""

    def __init__(self, num_prompts: int, enabled: bool) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=num_prompts, desc="Prompts", unit="prompt", dynamic_ncols=True, disable=not enabled)
        self._num_tokens = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def embedded(self) -> None:
        self._bar.update()

    def finished(self, output: RequestOutput) -> None:
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed:.1f} output tok/s", refresh=False)
        self._bar.update()


def embedding_output(request: EngineRequest, text: str | None, end: EngineOutput) -> EmbeddingOutput:
    """What the user receives. Raises `EngineError` when the engine could not do it."""
    if end.embedding is None:
        raise EngineError(end.error or f"The engine ended request {request.request_id} without an embedding.")
    return EmbeddingOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=request.prompt_token_ids,
        embedding=end.embedding,
        num_cached_tokens=end.num_cached_tokens,
    )


def split_prompt(prompt: Prompt) -> tuple[str | None, str | list[int]]:
    """A prompt's text, where it has one, and what is to be processed."""
    if isinstance(prompt, str):
        return prompt, prompt
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list):
        return None, prompt["prompt_token_ids"]
    raise InvalidRequestError(
        f"prompts: each must be a str or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}.", "prompts"
    )
