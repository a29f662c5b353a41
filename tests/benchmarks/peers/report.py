"""A comparison as Markdown, in the words of RESULTS.md. Every figure is the median over the rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

from .answers import num_equal
from .compare import Comparison
from .limits import Limits
from .measure import Served, Workload
from .programs import PEERS

T = TypeVar("T")

OURS, WHOSE_AIMS = ("quire", "unpacked"), "vllm"
LOAD, MEASURED = ("precision", "load", "streams"), ("tok/s", "TTFT ms", "ITL ms", "cached")

AIM_ONE_STREAM, AIM_MANY, AIM_HF, AIM_LIMIT, AIM_SERVE_PATH = 1.5, 2.0, 2.0, 0.7, 0.9


def markdown(found: Comparison) -> str:
    """All tables that there is something for."""
    parts = [_limits(found)]
    parts += [_ours(found)] if any(s.server in OURS for s in found.served) else []
    parts += [_beside(found, peer) for peer in PEERS if any(s.server == peer for s in found.served)]
    parts += [_share_of_limit(found)] if any(s.workload.concurrency == 1 for s in found.served) else []
    parts += [_hf(found)] if found.hf else []
    parts += [_serve_path(found)] if found.waves else []
    parts.append(_answers(found))
    return "\n\n".join(part for part in parts if part) + "\n"


def _limits(found: Comparison) -> str:
    def of(pick: Callable[[Limits], float]) -> float:
        return median(pick(limits) for limits in found.limits)

    rows = [
        ("copy of 1 GiB, read + written", f"{of(lambda x: x.copy_gb_per_s):.1f} GB/s"),
        ("sum of 1 GiB, read", f"{of(lambda x: x.sum_gb_per_s):.1f} GB/s"),
        ("float32 matrix product", f"{of(lambda x: x.float32_tflop_per_s):.2f} TFLOP/s"),
        ("bfloat16 matrix product", f"{of(lambda x: x.bfloat16_tflop_per_s):.2f} TFLOP/s"),
    ]
    return _table((f"limit, {found.limits[0].num_threads} threads", "measured"), rows)


def _ours(found: Comparison) -> str:
    rows = []
    for precision, workload in _in_order((s.precision, s.workload) for s in found.served):
        both = (_cells(_of(found, name, precision, workload)) for name in OURS)
        rows.append((*_load(precision, workload), *(cell for cells in both for cell in cells)))
    columns = [f"{whose}{each}" for whose in ("", "unpacked ") for each in MEASURED]
    return "Quire:\n\n" + _table((*LOAD, *columns), rows)


def _beside(found: Comparison, name: str) -> str:
    """What a peer gives under the loads that it was put to, and the rates of ours as multiples of its."""
    rows = []
    for precision, workload in _in_order((s.precision, s.workload) for s in found.served if s.server == name):
        peer, ours, unpacked = (_of(found, each, precision, workload) for each in (name, *OURS))
        has_aim = name == WHOSE_AIMS and not workload.is_sampled
        aim = f" (aim {AIM_ONE_STREAM if workload.concurrency == 1 else AIM_MANY:g}×)" if has_aim else ""
        ratio = _ratio(ours, peer)
        rows.append((*_load(precision, workload), *_cells(peer), ratio and ratio + aim, _ratio(unpacked, peer)))
    columns = (*LOAD, *MEASURED, "Quire", "unpacked")
    preloaded = found.preloaded.get(name)
    had = "" if preloaded is None else f" with {' and '.join(preloaded) or 'no library preloaded'}"
    return f"{PEERS[name].title}{had}, and Quire's tok/s as multiples of its:\n\n" + _table(columns, rows)


def _load(precision: str, workload: Workload) -> tuple[str, str, str]:
    return precision, workload.title, str(workload.concurrency)


def _ratio(ours: tuple[float, ...] | None, peer: tuple[float, ...] | None) -> str:
    """Of output tokens/s."""
    return f"**{ours[0] / peer[0]:.2f}×**" if ours and peer else ""


def _cells(values: tuple[float, float, float, float] | None) -> tuple[str, ...]:
    if values is None:
        return ("",) * 4
    rate, ttft, itl, cached = values
    return f"{rate:.1f}", f"{ttft:,.0f}", f"{itl:.1f}", f"{cached:.0%}"


def _of(found: Comparison, server: str, precision: str, workload: Workload) -> tuple[float, float, float, float] | None:
    """Output tokens/s, TTFT, ITL, share of cached prompt tokens."""
    chosen = [s for s in found.served if (s.server, s.precision, s.workload) == (server, precision, workload)]
    if not chosen:
        return None

    def of(pick: Callable[[Served], float]) -> float:
        return median(map(pick, chosen))

    return (
        of(lambda s: s.output_tokens_per_s),
        of(lambda s: s.ttft_ms),
        of(lambda s: s.itl_ms),
        of(lambda s: s.cached_share),
    )


def _share_of_limit(found: Comparison) -> str:
    rows = []
    for precision, workload in _in_order((s.precision, s.workload) for s in found.served):
        if workload.concurrency != 1 or not workload.is_plain:
            continue
        for name in (*OURS, *PEERS):
            chosen = [s for s in found.served if (s.server, s.precision, s.workload) == (name, precision, workload)]
            is_packed = name == "quire" or (precision == "int8" and name in PEERS and PEERS[name].is_packed_in_int8)
            if chosen and (is_packed or precision != "int8"):
                sizes = found.weight_bytes | (found.packed_bytes if is_packed else {})
                # What a token costs once the prompt is computed, as the limit is one of decoding; each beside its own.
                loads = [(1e3 / s.tpot_ms, s.memory_gb_per_s) for s in chosen if s.memory_gb_per_s is not None]
                rate, memory = (median(values) for values in zip(*loads, strict=True))
                limits = [gb_per_s * 1e9 / sizes[precision] for _, gb_per_s in loads]
                share = median(own / limit for (own, _), limit in zip(loads, limits, strict=True))
                rows.append(
                    (precision, name, f"{rate:.1f}", f"{memory:.1f}", f"{median(limits):.1f}", f"**{share:.0%}**")
                )
    title = "One stream, decoding (1 / TPOT), against the weights read once per token at the memory's speed around it"
    return f"{title} (aim for our best precision: {AIM_LIMIT:.0%}):\n\n" + _table(
        ("precision", "", "tok/s", "memory GB/s", "limit tok/s", "share"), rows
    )


def _hf(found: Comparison) -> str:
    rows = []
    for precision, batch in _in_order((precision, batch) for precision, batch, _ in found.hf):
        rate = median(r for p, b, r in found.hf if (p, b) == (precision, batch))
        ours = [s for s in found.served if (s.server, s.precision) == ("quire", precision)]
        same = [s.output_tokens_per_s for s in ours if s.workload.concurrency == batch and s.workload.is_plain]
        ratio = f"**{median(same) / rate:.2f}×** (aim {AIM_HF:g}×)" if same else ""
        rows.append((precision, str(batch), f"{rate:.1f}", f"{median(same):.1f}" if same else "", ratio))
    return _table(("precision", "batch", "HF generate tok/s", "Quire over HTTP tok/s", "ratio"), rows)


def _serve_path(found: Comparison) -> str:
    rows = []
    for precision in _in_order(precision for precision, _, _ in found.waves):
        http = median(w[1] for w in found.waves if w[0] == precision)
        offline = median(w[2] for w in found.waves if w[0] == precision)
        # Turn by turn: the two were measured within a minute of each other.
        share = median(w[1] / w[2] for w in found.waves if w[0] == precision)
        rows.append((precision, f"{http:.1f}", f"{offline:.1f}", f"**{share:.0%}** (aim {AIM_SERVE_PATH:.0%})"))
    return _table(("precision", "8 streams over HTTP tok/s", "8 at a time offline tok/s", "share"), rows)


def _answers(found: Comparison) -> str:
    """Who answers as whom, and each as itself in the round before."""
    lines = []
    for name, rounds in found.answers.items():
        if len(rounds) > 1:
            verdict = "the same" if all(answered == rounds[0] for answered in rounds) else "**not** the same"
            lines.append(f"- {name}: {verdict} tokens in all {len(rounds)} rounds")
    reference = found.answers.get("hf float32")
    for name, rounds in found.answers.items():
        if reference is not None and name != "hf float32":
            equal = num_equal(rounds[0], reference[0])
            lines.append(
                f"- {name}: {equal} of {len(reference[0])} greedy answers are token by token those of hf float32"
            )
    return "\n".join(lines)


def faults(found: Comparison) -> list[str]:
    """What must not be: Quire in float32 answers unlike `transformers`, or unlike itself."""
    wrong = [
        f"{name} answers differently from one round to the next"
        for name, rounds in found.answers.items()
        if name.startswith("quire") and any(answered != rounds[0] for answered in rounds)
    ]
    ours, reference = found.answers.get("quire float32"), found.answers.get("hf float32")
    if ours and reference and ours[0] != reference[0]:
        wrong.append("quire float32 does not answer as transformers does")
    return wrong


def _in_order(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
