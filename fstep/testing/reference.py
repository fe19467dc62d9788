"""The oracle of oracles: one request at a time, no batch, no cache, no step. Every rule is written out once more here,
one token id after the other, and shares no line with the code that it judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fstep.state import F32, FinishReason, SamplingParams

_WORD = 2**32
_BELOW_ANY_WINNER = -21.0


def reference_tokens(
    model_logits: Callable[[Sequence[int]], F32],
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    max_model_len: int,
    sample_index: int = 0,
) -> tuple[tuple[int, ...], FinishReason]:
    """The tokens that a request gets, and why it ends.

    `model_logits` gives the logits `[V]` that follow a list of token ids. Raises `ValueError` for a prompt that is
    empty or leaves no room for a token. Stop strings are not looked at: ids have no text here.
    """
    if not 0 < len(prompt_token_ids) < max_model_len:
        raise ValueError(f"a prompt of {len(prompt_token_ids)} tokens: must have 1 to {max_model_len - 1}")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    known = [int(token_id) for token_id in prompt_token_ids]
    output: list[int] = []
    while True:
        output.append(reference_token(model_logits(known), params, len(known), sample_index))
        known.append(output[-1])
        if output[-1] in ends:
            return tuple(output), FinishReason.STOP
        if len(output) == params.max_tokens or len(known) == max_model_len:
            return tuple(output), FinishReason.LENGTH


def reference_token(logits: F32, params: SamplingParams, position: int, sample_index: int = 0) -> int:
    """The token drawn from `logits [V]` for an index in the sequence: the best one, or the best of logit plus noise."""
    if params.greedy:
        return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
    kept = reference_kept(logits, params)
    seed = params.seed or 0
    scores = {
        token_id: np.float32(score + gumbel(seed, position, token_id, sample_index=sample_index))
        for token_id, score in kept.items()
        if score >= _BELOW_ANY_WINNER
    }
    return max(scores, key=lambda token_id: (scores[token_id], -token_id))


def reference_kept(logits: F32, params: SamplingParams) -> dict[int, np.float32]:
    """The ids that temperature, min-p, top-k and top-p leave, with (logit - greatest) / temperature in float32."""
    temperature = np.float32(params.temperature)
    highest = np.float32(max(logits))
    kept = {token_id: np.float32(np.float32(each - highest) / temperature) for token_id, each in enumerate(logits)}
    if params.min_p > 0:
        kept = {each: score for each, score in kept.items() if math.exp(score) >= params.min_p}
    if 0 < params.top_k < len(kept):
        border = sorted(kept.values(), reverse=True)[params.top_k - 1]
        kept = {each: score for each, score in kept.items() if score >= border}
    return _nucleus(kept, params.top_p) if params.top_p < 1 else kept


def _nucleus(kept: Mapping[int, np.float32], top_p: float) -> dict[int, np.float32]:
    """The fewest of the most probable ids that together reach `top_p`; of two equal ones the lower id comes first."""
    total = sum(math.exp(score) for score in kept.values())
    reached = 0.0
    nucleus: dict[int, np.float32] = {}
    for token_id in sorted(kept, key=lambda each: (-kept[each], each)):
        if reached >= top_p * total:
            break
        reached += math.exp(kept[token_id])
        nucleus[token_id] = kept[token_id]
    return nucleus


def gumbel(seed: int, position: int, token_id: int, stream: int = 0, sample_index: int = 0) -> np.float32:
    """The noise of one token id: -log(-log(u)), u a uniform number of 24 bits."""
    words = philox((token_id // 4, position, stream, sample_index), (seed % _WORD, seed // _WORD))
    u = ((words[token_id % 4] >> 8) + 0.5) / 2**24
    return np.float32(-math.log(-math.log(u)))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al., SC 2011) on Python's integers."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right // _WORD) ^ b ^ low, right % _WORD, (left // _WORD) ^ d ^ high, left % _WORD
        low, high = (low + 0x9E3779B9) % _WORD, (high + 0xBB67AE85) % _WORD
    return a, b, c, d
