"""The kit finds each planted fault, and shrinks what shows it to a few requests."""

import pytest

from fstep.state import Plan
from fstep.testing import reference_tokens
from fstep.testing.machine import check_runner
from fstep.testing.strategies import a_request
from tests.testing.planted.block_freed_twice import BlockFreedTwice
from tests.testing.planted.decode_prefill_swapped import DecodePrefillSwapped
from tests.testing.planted.hit_before_last_token import HitBeforeLastToken
from tests.testing.planted.slot_past_boundary import SlotPastBoundary
from tests.testing.planted.sound import Sound
from tests.testing.planted.stale_row import StaleRow
from tests.testing.planted.token_of_partial_prompt import TokenOfPartialPrompt

FAULTS = (
    BlockFreedTwice,
    DecodePrefillSwapped,
    HitBeforeLastToken,
    SlotPastBoundary,
    StaleRow,
    TokenOfPartialPrompt,
)


#: What `Sound` serves: ids and lengths of its model, every sampling parameter.
REQUESTS = a_request(Plan(vocab_size=32, max_model_len=16, groups=()))


def with_answers(engine):
    """The engine, which says what a request must get."""

    def reference(self, request):
        prompt = request.prompt_token_ids.tolist()
        return reference_tokens(self.model.reference_logits, prompt, request.sampling, (), self.max_model_len)

    return type(engine.__name__, (engine,), {"reference": reference})


def test_nothing_is_found_in_the_sound_engine(findings):
    found = check_runner(with_answers(Sound), requests=REQUESTS, examples=300, random_seed=1)
    findings(found)
    assert found.unseen == ("schedule",)
    assert found.counts["requests"] > 300


def requests_left(fault, random_seed):
    """How many requests the search leaves of the example that it finds."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a check, or what the broken engine raises itself
        check_runner(with_answers(fault), requests=REQUESTS, examples=2000, random_seed=random_seed)
    return caught.value.__notes__[0].count("runner.add(")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_shrunk(fault):
    """To shrink is a search that may end early: the first of up to five that does it."""
    assert any(requests_left(fault, random_seed) <= 4 for random_seed in range(1, 6))
