"""Hypothesis strategies for whole runs: plans, limits, requests, and scripts of what happens when.

Small numbers on purpose: a batch that breaks something does so with three requests of five tokens, and a pool that is
just big enough for one request makes preemption the rule. Needs `hypothesis`.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve, frozen
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fstep.state import (
    BatchDescriptor,
    KVGroup,
    NewRequest,
    Plan,
    SamplingParams,
    SchedLimits,
    SchedulingPolicy,
    Tail,
)

EOS = 1  #: the end token of every plan drawn here
VOCAB_SIZES = (13, 33, 8, 5)
BLOCK_SIZES = (2, 1, 3, 4, 2, 8, 16)


@frozen
class Script:
    """A run from the outside: who comes and goes in which step, and what an adversarial scheduler decides."""

    plan: Plan
    limits: SchedLimits
    arrivals: tuple[tuple[int, NewRequest], ...]  #: (step, request), steps ascending
    aborts: tuple[tuple[int, str], ...] = ()  #: (step, request id)
    choices: bytes = b""  #: for `adversarial_schedule`; when they are used up, or if there are none, FCFS

    @property
    def requests(self) -> tuple[NewRequest, ...]:
        return tuple(request for _, request in self.arrivals)


def sampling_params(
    vocab_size: int, max_tokens: int = 20, greedy: bool | None = None
) -> SearchStrategy[SamplingParams]:
    """Every parameter, with stop ids that are likely to be drawn; always seeded."""
    hot = st.sampled_from((1.0, 0.3, 3.0)) | st.floats(0.0625, 8, width=32)
    temperatures = {None: st.just(0.0) | hot, True: st.just(0.0), False: hot}[greedy]
    return st.builds(
        SamplingParams,
        temperature=temperatures,
        top_p=st.just(1.0) | st.floats(0.0625, 1, width=32),
        top_k=st.just(0) | st.integers(1, vocab_size + 1),
        min_p=st.just(0.0) | st.floats(0, 1, width=32),
        seed=st.integers(0, 3) | st.integers(0, 2**64 - 1),
        max_tokens=st.sampled_from((None, None, None, 1)) | st.integers(1, max_tokens),
        stop_token_ids=st.just(()) | st.lists(st.integers(0, vocab_size - 1), max_size=2).map(tuple),
        ignore_eos=st.sampled_from((True, True, False)),
    )


def prompts(vocab_size: int, max_len: int) -> SearchStrategy[list[int]]:
    """Lists of token ids; short and long ones as often."""
    ids = st.integers(0, vocab_size - 1)
    return st.integers(1, max_len).flatmap(lambda size: st.lists(ids, min_size=size, max_size=size))


@st.composite
def requests(
    draw: DrawFn, plan: Plan, min_size: int = 1, max_size: int = 5, greedy: bool | None = None
) -> tuple[NewRequest, ...]:
    """Requests that `plan` can serve, named a, b, c, …; the prompts of many begin alike."""
    count = draw(st.sampled_from(range(max_size, min_size - 1, -1)))
    longest = plan.max_model_len - 1
    stem = draw(prompts(plan.vocab_size, longest))
    stems = st.sampled_from((0, len(stem))) | st.integers(0, len(stem))
    return tuple(
        NewRequest(
            request_id="abcdefghijklmnopqrstuvwxyz"[number],
            prompt_token_ids=(stem[: draw(stems)] + draw(prompts(plan.vocab_size, longest)))[:longest],
            sampling=draw(sampling_params(plan.vocab_size, greedy=greedy)),
            priority=draw(st.integers(0, 2)),
        )
        for number in range(count)
    )


def a_request(plan: Plan) -> SearchStrategy[NewRequest]:
    """One request that `plan` can serve, named a."""
    ids = prompts(plan.vocab_size, plan.max_model_len - 1)
    return st.builds(NewRequest, st.just("a"), ids, sampling_params(plan.vocab_size))


def small_requests(
    vocab_size: int = 16, longest_prompt: int = 12, most_tokens: int = 6, greedy: bool = True
) -> SearchStrategy[NewRequest]:
    """One request, named a, for a runner of which nothing is known but that it takes such ids and lengths."""
    sampling = st.builds(
        SamplingParams,
        temperature=st.just(0.0) if greedy else st.sampled_from((0.0, 1.0)),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, most_tokens),
        ignore_eos=st.just(True),
    )
    return st.builds(NewRequest, st.just("a"), prompts(vocab_size, longest_prompt), sampling)


def limits() -> SearchStrategy[SchedLimits]:
    """Token budgets and numbers of sequences from 1 up, chunks cut short or not, every policy."""
    return st.builds(
        SchedLimits,
        max_num_seqs=st.sampled_from((6, 1, 2, 3, 4, 5)),
        max_num_batched_tokens=st.sampled_from((64, 1, 2, 3)) | st.integers(1, 24),
        long_prefill_token_threshold=st.just(0) | st.integers(1, 6),
        max_long_partial_prefills=st.sampled_from((0, 0, 1, 2)),
        scheduling_policy=st.sampled_from(SchedulingPolicy),
    )


def captures() -> SearchStrategy[tuple[BatchDescriptor, ...]]:
    """No capture sizes, or a few, ascending, so that most steps are padded in tokens, requests or both."""
    sizes = st.builds(BatchDescriptor, st.sampled_from((1, 2, 4, 8, 16, 32)), st.integers(1, 8))
    return st.just(()) | st.lists(sizes, min_size=1, max_size=4, unique=True).map(lambda each: tuple(sorted(each)))


@st.composite
def plans(draw: DrawFn, layer_groups: tuple[int, ...] = (0,), max_model_len: int = 20, recurrent: bool = False) -> Plan:
    """Plans whose pools hold the longest request and a few blocks more, each KV group with a block size of its own."""
    longest = draw(st.sampled_from((max_model_len, max_model_len // 2)) | st.integers(2, max_model_len))
    groups = tuple(
        _group(draw, longest, tuple(layer for layer, each in enumerate(layer_groups) if each == group), recurrent)
        for group in sorted(set(layer_groups))
    )
    return Plan(
        vocab_size=draw(st.sampled_from(VOCAB_SIZES)),
        max_model_len=longest,
        groups=groups,
        eos_token_ids=(EOS,),
        capture=draw(captures()),
        tail=draw(st.sampled_from(Tail)),
        prefix_caching=draw(st.sampled_from((True, True, False))),
    )


def _group(draw: DrawFn, longest: int, layers: tuple[int, ...], recurrent: bool) -> KVGroup:
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    spare = draw(st.sampled_from((0, 1, 2, 4)))
    return KVGroup(1 + -(-longest // block_size) + spare, block_size, layers, recurrent)


@st.composite
def scripts(
    draw: DrawFn,
    layer_groups: tuple[int, ...] = (0,),
    aborts: bool = False,
    adversarial: bool = False,
    same_ids: bool = False,
    greedy: bool | None = None,
    recurrent: bool = False,
) -> Script:
    """Whole runs. With `same_ids` some requests carry the name of one that came before and has ended by then."""
    plan = draw(plans(layer_groups, recurrent=recurrent))
    some = draw(requests(plan, greedy=greedy))
    if same_ids:
        some = tuple(evolve(each, request_id="ab"[number % 2]) for number, each in enumerate(some))
    steps = np.cumsum(draw(st.lists(st.sampled_from((0, 0, 1, 2, 5)), min_size=len(some), max_size=len(some)))).tolist()
    names = st.sampled_from([each.request_id for each in some])
    gone = draw(st.lists(st.tuples(st.integers(0, 12), names), max_size=4)) if aborts else []
    return Script(
        plan=plan,
        limits=draw(limits()),
        arrivals=tuple(zip(steps, some, strict=True)),
        aborts=tuple(sorted(gone)),
        choices=draw(choices()) if adversarial else b"",
    )


def choices(most: int = 250) -> SearchStrategy[bytes]:
    """What an `adversary` decides by; few bytes as often as many."""
    return st.integers(0, most).flatmap(lambda size: st.binary(min_size=size, max_size=size))


def permutations(size: int) -> SearchStrategy[np.ndarray]:
    """The numbers 0 to `size - 1` in any order: `[size]`."""
    return st.permutations(range(size)).map(np.array)
