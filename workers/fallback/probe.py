"""Runs a model once on the meta device, to see what its layers ask of attention and whether we can do it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.errors import ConfigError

from .interface import answering

_NUM_TOKENS = 5
_NUM_ROWS_LOOKED_AT = 16

# Arguments of attention that change nothing here: dropout is off, and the others are for other implementations.
_OF_NO_EFFECT = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_router_logits",
}
_UNDERSTOOD = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention call of the forward looks like; the calls of a model, in order, are its layers here."""

    num_kv_heads: int
    head_dim: int  # of the cache: the larger of those of keys and values
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class _AttentionMask:
    """What the model is given for a mask. No tensor, so that nothing can be done with it but to hand it on."""

    sliding_window: int | None


class _Probe:
    def __init__(self, architecture: str, max_model_len: int) -> None:
        self._architecture = architecture
        self._max_model_len = max_model_len
        self.calls: list[AttentionCall] = []

    def refuse(self, found: str) -> ConfigError:
        return refusal(self._architecture, found)

    def make_mask(self, arguments: dict[str, Any]) -> _AttentionMask:
        """Look at who sees whom: every token what is before it, or the same window in every row."""
        length = self._max_model_len
        rows = torch.linspace(0, length - 1, min(length, _NUM_ROWS_LOOKED_AT), device="cpu").long()
        columns = torch.arange(length, device="cpu")
        with torch.device("cpu"):
            try:
                visible = arguments["mask_function"](0, 0, rows[:, None], columns[None, :])
            except (RuntimeError, IndexError) as error:  # it looks at tokens, which are not there
                raise self.refuse(f"masks that depend on more than positions ({_first_line(error)})") from error
        visible = visible & (columns[None, :] <= columns[None, -1:]) if isinstance(visible, Tensor) else None
        if visible is None:
            raise self.refuse("a mask that is no function of positions")
        window = int(visible[-1].sum())
        distance = rows[:, None] - columns[None, :]
        if torch.equal(visible, (distance >= 0) & (distance < window)):
            return _AttentionMask(None if window == length else window)
        raise self.refuse("masks that are neither causal nor causal within a window")

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        where = f"in {type(module).__name__}"
        if not isinstance(mask, _AttentionMask | None):
            raise self.refuse(f"attention with a bias or a mask of the layer's own {where}")
        if (arguments.get("is_causal", getattr(module, "is_causal", True))) is False:
            raise self.refuse(f"attention that is not causal {where}")
        unknown = [
            name
            for name, given in arguments.items()
            if given is not None and given is not False and name not in _UNDERSTOOD | _OF_NO_EFFECT
        ]
        if unknown:
            raise self.refuse(f"attention with {', '.join(sorted(unknown))} {where}, which ours has not")
        if key.shape[2] != _NUM_TOKENS or query.shape[2] != _NUM_TOKENS:
            raise self.refuse(f"attention to something else than the tokens of the request {where}")
        if query.shape[1] % key.shape[1]:
            raise self.refuse(f"{query.shape[1]} query heads over {key.shape[1]} KV heads {where}")
        window = _smaller(None if mask is None else mask.sliding_window, arguments.get("sliding_window"))
        if window is not None and window >= self._max_model_len:
            window = None
        self.calls.append(AttentionCall(key.shape[1], max(key.shape[3], value.shape[3]), window))
        return query.new_empty(1, _NUM_TOKENS, query.shape[1], value.shape[3])


def probe(causal_lm: Any, architecture: str, max_model_len: int) -> list[AttentionCall]:
    """The attention calls of a model on the meta device that was built with `PROBING` attention.

    Raises `ConfigError`, saying what was found, when the model cannot work over a paged cache.
    """
    found = _Probe(architecture, max_model_len)
    body = body_of(causal_lm)
    if body is None:
        raise found.refuse("no body apart from its head")
    _check_structure(causal_lm, found)
    if "position_ids" not in inspect.signature(type(body).forward).parameters:
        raise found.refuse("no way to say the positions of tokens to its forward")
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), answering(found.attend, found.make_mask):
            # The mask of ones keeps transformers from looking at the positions, which have no values here.
            body(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        if _AttentionMask.__name__ in str(error):
            raise found.refuse("layers that compute with the attention mask themselves") from error
        problem = f"{type(error).__name__}: {_first_line(error)}"
        raise found.refuse(f"a forward that cannot run without weights ({problem})") from error
    layers = causal_lm.config.get_text_config().num_hidden_layers
    if not found.calls:
        raise found.refuse("layers that never call the attention interface of transformers")
    if len(found.calls) < layers:
        raise found.refuse(
            f"{layers} layers of which {len(found.calls)} call the attention interface of transformers; the others "
            "keep a state of another kind"
        )
    return found.calls


def _check_structure(causal_lm: Any, found: _Probe) -> None:
    """Raise `ConfigError` for what its parts alone give away, in better words than a failed forward could."""
    if any("alibi" in name for name in dir(inspect.getmodule(type(causal_lm)))):
        raise found.refuse("attention with a bias that grows with the distance (ALiBi)")
    convolutions = {
        type(module).__name__
        for module in causal_lm.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    }
    if convolutions:
        raise found.refuse(f"layers with a state besides keys and values ({', '.join(sorted(convolutions))})")
    kinds = getattr(causal_lm.config, "layer_types", None) or ()
    other = sorted({kind for kind in kinds if "attention" not in kind or "linear" in kind})
    if other:
        raise found.refuse(f"layers with a state besides keys and values ({', '.join(other)})")


def body_of(causal_lm: Any) -> Any:
    """What makes hidden states, without what makes logits of them; None where they are one."""
    body = causal_lm.base_model
    if body is causal_lm:  # the prefix of its names is another
        body = getattr(causal_lm, "model", None)
    return body


def refusal(architecture: str, found: str) -> ConfigError:
    return ConfigError(
        f"model: {architecture} is not supported: it is not one of our own families, and it cannot run through "
        f"transformers over a paged KV cache, because it has {found}."
    )


def _smaller(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
