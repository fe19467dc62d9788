"""`sample`: one token for each row, by Gumbel-max with counter-based noise.

A token is the argmax of the processed logits plus Gumbel noise (Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014,
and older), where the noise belongs to (seed, position, token id) and not to the moment of drawing: see `philox`. The
logits are shifted so that the best one is 0, divided by the temperature, and cut by min-p, top-k and top-p, in vLLM's
order. Top-k keeps all ties with the k-th logit; of equal probabilities at top-p's border the lower ids stay; equal
scores go to the lowest id. An id so far below the best that no noise lifts it above draws none.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from fstep.ops.philox import HIGHEST_GUMBEL, LANES, LOWEST_GUMBEL, TARGET, UNIFORM_BITS, philox4x32, uniform
from fstep.state import I32, BatchState, Env, Inputs, Sampled, SampleError, SamplingRows

_HOPELESS = LOWEST_GUMBEL - HIGHEST_GUMBEL - 0.5  #: a shifted logit under this can't win
_WORD = 0xFFFFFFFF
_BLOCK = 64  #: ids of a block in the search for the best one


def sample(state: BatchState, env: Env) -> BatchState:
    """The state with the step's `Sampled`, still on the device.

    A row whose logits hold NaN or +inf, or no finite id at all, gets an error code and no token; the others are not
    touched by it. Raises `PhaseError` before `forward`.
    """
    step = state.need_step("sample")
    output, inputs = step.need_output("sample"), step.inputs
    best, token_ids = _best(output.logits)
    usable = torch.isfinite(best)
    hot = np.nonzero((state.rows.sampling.temperature[inputs.rows] > 0) & ~inputs.discard)[0].astype(np.int32)
    if len(hot):
        drawn = _draw(output.logits, best, _on_device(state.rows.sampling, inputs, hot, env))
        token_ids = token_ids.index_copy(0, drawn.rows, drawn.token_ids)
    (discard,) = env.device.put((inputs.discard.astype(np.int32),))
    drew = usable & (discard == 0)
    sampled = Sampled(
        token_ids=torch.where(drew, token_ids, -1).to(torch.int32)[:, None],
        num_sampled=drew.to(torch.int32),
        error=torch.where(usable | (discard != 0), SampleError.NONE, SampleError.NO_DISTRIBUTION).to(torch.int32),
    )
    return state.with_step(evolve(step, sampled=sampled))


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, NaN if there is one, and the lowest id that has it.

    In two stages, the best block of ids and the best id in it: a maximum without indices is a vector instruction, one
    with indices is not. Each stage goes through memory in the order in which the logits lie there.
    """
    num_rows, vocab_size = logits.shape
    width = math.gcd(vocab_size, _BLOCK)
    if num_rows > 1 and logits.stride(0) < logits.stride(1):  # features first
        blocks = logits.t().reshape(vocab_size // width, width, num_rows)
        block, blocks = blocks.amax(dim=1).argmax(dim=0), blocks.permute(2, 0, 1)
    else:
        blocks = logits.reshape(num_rows, vocab_size // width, width)
        block = blocks.amax(dim=2).argmax(dim=1)
    best, within = blocks[torch.arange(num_rows, device=logits.device), block].max(dim=-1)
    return best, block * width + within


@frozen(eq=False)
class _Drawn:
    rows: Tensor  #: [n] int64, logits rows
    token_ids: Tensor  #: [n] int64


@frozen(eq=False)
class _Columns:
    """The sampling parameters of the `n` logits rows that draw at random; `[n]` on the device."""

    rows: Tensor  #: int64
    position: Tensor  #: int64
    temperature: Tensor  #: float32
    top_k: Tensor  #: int64, 0 is all
    top_p: Tensor  #: float32
    min_p: Tensor  #: float32
    seed: tuple[Tensor, Tensor]  #: int64, the low and the high word
    sample_index: Tensor  #: int64
    largest_k: int
    any_top_p: bool
    any_min_p: bool


def _on_device(sampling: SamplingRows, inputs: Inputs, hot: I32, env: Env) -> _Columns:
    at = inputs.rows[hot]
    seed, top_k = sampling.seed[at], sampling.top_k[at]
    floats = (sampling.temperature[at], sampling.top_p[at], sampling.min_p[at])
    words = ((seed & np.uint64(_WORD)).astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32))
    integers = (hot, inputs.sample_positions[hot], sampling.sample_index[at], top_k)
    columns = (*integers, *(each.view(np.int32) for each in (*floats, *words)))
    rows, position, sample_index, k, temperature, top_p, min_p, low, high = env.device.put(columns)
    return _Columns(
        rows=rows.long(),
        position=position.long(),
        temperature=temperature.view(torch.float32),
        top_k=k.long(),
        top_p=top_p.view(torch.float32),
        min_p=min_p.view(torch.float32),
        seed=(low.long() & _WORD, high.long() & _WORD),
        sample_index=sample_index.long(),
        largest_k=int(top_k.max()),
        any_top_p=bool((floats[1] < 1).any()),
        any_min_p=bool((floats[2] > 0).any()),
    )


def _draw(logits: Tensor, best: Tensor, columns: _Columns) -> _Drawn:
    shifted = (logits.index_select(0, columns.rows) - best.index_select(0, columns.rows)[:, None]).nan_to_num_(
        nan=-torch.inf, neginf=-torch.inf
    )
    scores = shifted.div_(columns.temperature[:, None])
    if columns.any_min_p:
        scores = _min_p(scores, columns.min_p)
    if columns.largest_k:
        scores = _top_k(scores, columns.top_k, columns.largest_k)
    if columns.any_top_p:
        scores = _top_p(scores, columns.top_p)
    return _Drawn(columns.rows, _with_noise(scores, columns).argmax(dim=-1))


def _min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Drops ids less probable than `min_p` of the best one, whose score is 0."""
    return scores.masked_fill(scores < min_p.log()[:, None], -torch.inf)


def _top_k(scores: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """Drops ids below the k-th best score."""
    best = scores.topk(largest_k, dim=-1).values
    kth = best.gather(1, (top_k.clamp(min=1) - 1)[:, None])
    return scores.masked_fill((scores < kth) & (top_k > 0)[:, None], -torch.inf)


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest best ids whose probabilities reach `top_p`; never none."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probability = ordered.double().softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    drop = (before >= top_p.double()[:, None]) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(1, ids, drop), -torch.inf)


def _with_noise(scores: Tensor, columns: _Columns) -> Tensor:
    """Scores plus noise, -inf where an id can't win: `[n, V]`."""
    num_rows, vocab_size = scores.shape
    lanes = torch.nn.functional.pad(scores, (0, -vocab_size % LANES), value=-torch.inf).view(num_rows, -1, LANES)
    row, call = (lanes > _HOPELESS).any(dim=-1).nonzero(as_tuple=True)
    seed = (columns.seed[0][row], columns.seed[1][row])
    gumbel = _gumbel(seed, columns.sample_index[row], columns.position[row], call)
    hopeful = lanes[row, call]
    lifted = torch.where(hopeful > _HOPELESS, hopeful + gumbel, -torch.inf)
    return torch.full_like(lanes, -torch.inf).index_put_((row, call), lifted).view(num_rows, -1)


def _gumbel(seed: tuple[Tensor, Tensor], sample_index: Tensor, position: Tensor, call: Tensor) -> Tensor:
    """The noise of four token ids a call: `[n, 4]` float32."""
    words = philox4x32((call, position, torch.full_like(call, TARGET), sample_index), seed)
    upper = (torch.stack(words, dim=-1) >> (32 - UNIFORM_BITS)).double()
    return (-(-uniform(upper).log()).log()).float()
