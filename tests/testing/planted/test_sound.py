"""The engine without a fault is right, and each planted fault is one place of it."""

from __future__ import annotations

import difflib
import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fstep.state import NewRequest, SamplingParams
from fstep.testing import Runner, reference_tokens
from tests.testing.planted.block_freed_twice import BlockFreedTwice
from tests.testing.planted.decode_prefill_swapped import DecodePrefillSwapped
from tests.testing.planted.hit_before_last_token import HitBeforeLastToken
from tests.testing.planted.slot_past_boundary import SlotPastBoundary
from tests.testing.planted.sound import Sound
from tests.testing.planted.stale_row import StaleRow
from tests.testing.planted.token_of_partial_prompt import TokenOfPartialPrompt

FAULTY = (StaleRow, BlockFreedTwice, HitBeforeLastToken, DecodePrefillSwapped, SlotPastBoundary, TokenOfPartialPrompt)

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 8),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2).map(tuple),
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=8)
sets = st.lists(st.tuples(prompts, sampling, st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=7)


def run(runner: Sound, requests: list[tuple[NewRequest, int, int]]) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and reason by request, each added after so many steps and aborted so many later, if it still runs."""
    got: dict[str, tuple[list[int], str | None]] = {request.request_id: ([], None) for request, *_ in requests}
    for turn in range(400):
        for request, start, life in requests:
            if turn == start:
                runner.add(request)
            if turn == start + life:
                runner.abort(request.request_id)
        for output in runner.step().outputs:
            tokens, reason = got[output.request_id]
            assert reason is None, "a token after the end"
            got[output.request_id] = ([*tokens, *output.token_ids], output.finish_reason)
        if turn > 4 and not runner.has_unfinished():
            return got
    raise AssertionError("it never ends")


def check(runner: Sound, requests: list[tuple[NewRequest, int, int]]) -> None:
    got = run(runner, requests)
    for request, _, life in requests:
        tokens, reason = reference_tokens(
            runner.model.reference_logits,
            request.prompt_token_ids.tolist(),
            request.sampling,
            (),
            runner.max_model_len,
        )
        made, why = got[request.request_id]
        if why is None:
            assert life < 400, "it has no end"
            assert tuple(made) == tokens[: len(made)]
        else:
            assert (tuple(made), why) == (tokens, reason)
    assert sorted((*runner.free, *runner.cached)) == list(range(1, runner.num_blocks))
    assert not runner.refs.any()


@settings(max_examples=150, deadline=None)
@given(sets, st.booleans(), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(0, 6), st.booleans())
def test_sound_gives_reference_tokens(
    made: list, caching: bool, budget: int, seqs: int, size: int, spare: int, aborts: bool
) -> None:
    runner = Sound(1 + -(-15 // size) + spare, size, seqs, budget, 8, 16, caching)
    requests = [
        (NewRequest(str(number), prompt, params), start, life if aborts else 400)
        for number, (prompt, params, start, life) in enumerate(made)
    ]
    check(runner, requests)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize(
    "prompts", [[[1]], [[1, 2, 3, 4]] * 3, [[1] * 8, [1] * 9, [1] * 4], [[n] * n for n in range(1, 9)]]
)
def test_sound_gives_reference_tokens_by_hand(budget: int, prompts: list[list[int]]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6)
    requests = [(NewRequest(str(n), prompt, greedy), n // 2, 400) for n, prompt in enumerate(prompts)]
    check(Sound(max_num_batched_tokens=budget), requests)


def test_sound_is_a_runner() -> None:
    runner: Runner = Sound()
    runner.add(NewRequest("a", [1]))
    with pytest.raises(ValueError, match="in use"):
        runner.add(NewRequest("a", [1]))


@pytest.mark.parametrize("faulty", FAULTY)
def test_a_fault_is_one_place(faulty: type[Sound]) -> None:
    (name,) = [name for name in vars(faulty) if not name.startswith("__")]
    sound, planted = (inspect.getsource(getattr(each, name)).splitlines() for each in (Sound, faulty))
    changed = [line for line in difflib.ndiff(sound, planted) if line[0] in "+-"]
    assert 1 <= len(changed) <= 10
