"""The invariants under random schedules, token for token against a reference that has no batch and no cache.

Whatever `play` runs is checked at each step for I2 (nothing that a phase was given changes), I4, I5, I6, I7, I18, and
has NaN in every cell that nobody owns (I8, I17) and in every padded token. So each test below holds these too.
"""

from collections import deque
from functools import partial

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.ops import prefix
from fstep.state import CacheKey, RowPhase
from fstep.testing import (
    HashModel,
    RollingModel,
    adversarial_schedule,
    check_against_reference,
    check_forks,
    check_hit,
    check_isolated,
    check_limits,
    check_padding,
    check_permuted,
    check_persistent,
    check_preempted,
    check_repeated,
    check_split,
    play,
)
from fstep.testing.strategies import captures, permutations, scripts

ALIVE = (RowPhase.RUNNING, RowPhase.PREEMPTED)

#: By name: how a model is made for a plan, and the scripts for it.
MODELS = {
    "hash": (lambda plan: HashModel(plan.vocab_size, plan.max_model_len), scripts),
    "hash-groups": (
        lambda plan: HashModel(plan.vocab_size, plan.max_model_len, (0, 1, 0)),
        partial(scripts, (0, 1, 0)),
    ),
    "rolling": (
        lambda plan: RollingModel(plan.vocab_size, plan.max_model_len),
        partial(scripts, recurrent=True),
    ),
}


@pytest.fixture(params=MODELS)
def kind(request):
    return MODELS[request.param]


def at_least(tally, **least):
    """So that a strategy that has become tame is noticed; other seeds give about three times as much."""
    assert {what: tally[what] for what in least if tally[what] < least[what]} == {}


def test_i1_tokens_do_not_depend_on_the_schedule(kind, start, examples, tally):
    """First come, first served, under any limits, pool, order of arrival and capture sizes."""
    make, some = kind

    @examples(50)
    @given(some())
    def holds(script):
        model = make(script.plan)
        played = play(script, *start(model, script.plan), watch=lambda step: check_limits(step.schedule, step.sched))
        tally.update(played.counts)
        check_against_reference(model, script.plan, played.answers)

    holds()
    at_least(tally, runs=50, steps=400, preemptions=5, partial_prompts=60, padded_steps=15, mixed_steps=1)
    at_least(tally, finished_stop=4, finished_length=40, one_step_lives=5, empty_steps=25)


def test_i1_i10_i11_tokens_do_not_depend_on_a_scheduler_without_sense(kind, start, examples, tally):
    """Preempted at any step, chunks cut anywhere, any order, aborted in any phase, ids used again."""
    make, some = kind

    @examples(70)
    @given(some(aborts=True, adversarial=True, same_ids=True))
    def holds(script):
        model = make(script.plan)
        played = play(script, *start(model, script.plan))
        tally.update(played.counts)
        check_against_reference(model, script.plan, played.answers)

    holds()
    tally["aborts"] = sum(tally[f"abort_{phase}"] for phase in ("waiting", "running", "preempted", "stopped", "full"))
    at_least(tally, runs=70, steps=400, preemptions=20, resumptions=18, partial_prompts=50, id_again=25)
    at_least(tally, aborts=12, padded_steps=10, empty_steps=60)


def test_i2_each_phase_gives_the_same_bits_again(kind, start, examples, tally):
    """And `forward` may be repeated with the handle that it returned, not with the one that it was given."""
    make, some = kind

    @examples(12)
    @given(some())
    def holds(script):
        env, kv = start(make(script.plan), script.plan)
        handles = [kv]

        def again(moment):
            handles.append(check_repeated(moment, env, donated=handles[-1]))
            return handles[-1]

        tally.update(play(script, env, kv, watch=again).counts)

    holds()
    at_least(tally, steps=80, preemptions=1)


def test_i3_a_state_from_ten_steps_ago_gives_what_it_gave(kind, start, examples, tally):
    """The phases on the host and `sample` give their bits; `forward` does on a clone made then, and refuses others."""
    make, some = kind

    @examples(12)
    @given(some(adversarial=True))
    def holds(script):
        env, kv = start(make(script.plan), script.plan)
        kept = deque([(None, kv.clone())], maxlen=11)  # moments, each with a clone of the cache after it

        def look_back(moment):
            kept.append((moment, moment.kv.clone()))
            if len(kept) < kept.maxlen:
                return
            (_, clone), (old, _) = kept[0], kept[1]
            tally["looks_back"] += 1
            check_persistent(old, env, clone, moment.kv)

        tally.update(play(script, env, kv, watch=look_back).counts)

    holds()
    at_least(tally, looks_back=60, steps=100, preemptions=8)


def test_i8_padding_changes_no_bit(kind, start, examples, tally):
    """The same step padded to another shape, or to none."""
    make, some = kind

    @examples(16)
    @given(some(), captures())
    def holds(script, capture):
        env, kv = start(make(script.plan), script.plan)
        clones = [kv.clone()]

        def pad_otherwise(moment):
            forwarded = check_padding(moment, env, clones.pop(), capture=capture)
            sizes = {each.step.padding.descriptor for each in (forwarded, moment.forwarded)}
            tally["steps_of_two_sizes"] += len(sizes) == 2
            clones.append(moment.kv.clone())

        tally.update(play(script, env, kv, watch=pad_otherwise).counts)

    holds()
    at_least(tally, steps=100, steps_of_two_sizes=20)


def test_i9_permuting_the_requests_permutes_the_outputs(kind, start, examples, tally):
    make, some = kind

    @examples(20)
    @given(some(adversarial=True), st.data())
    def holds(script, data):
        env, kv = start(make(script.plan), script.plan)
        clones = [kv.clone()]

        def permute(moment):
            clone = clones.pop()
            clones.append(moment.kv.clone())
            size = len(moment.schedule.request_ids)
            if size < 2:
                return
            order = data.draw(permutations(size))
            tally["permuted_steps"] += 1
            check_permuted(moment, env, clone, order)

        tally.update(play(script, env, kv, watch=permute).counts)

    holds()
    at_least(tally, permuted_steps=25)


def test_i10_any_split_of_a_prompt_gives_the_same_tokens(kind, start, examples, tally):
    make, some = kind

    @examples(20)
    @given(some(), st.lists(st.integers(0, 7), max_size=30))
    def holds(script, cuts):
        model = make(script.plan)
        played = play(script, *start(model, script.plan), scheduler=with_cuts(cuts))
        tally.update(played.counts)
        check_against_reference(model, script.plan, played.answers)

    holds()
    at_least(tally, partial_prompts=12, continued_prompts=4)


def test_i10_the_two_halves_of_a_chunk_give_what_the_whole_gives(kind, start, examples, tally):
    make, some = kind

    @examples(20)
    @given(some(adversarial=True), st.data())
    def holds(script, data):
        env, kv = start(make(script.plan), script.plan)
        clones = [kv.clone()]

        def halve(moment):
            clone = clones.pop()
            clones.append(moment.kv.clone())
            counts = moment.schedule.num_scheduled_tokens.tolist()
            longer = [b for b, count in enumerate(counts) if count > 1]
            if longer:
                b = data.draw(st.sampled_from(longer))
                check_split(moment, env, clone, b, data.draw(st.integers(1, counts[b] - 1)))
                tally["halved_steps"] += 1

        tally.update(play(script, env, kv, watch=halve).counts)

    holds()
    at_least(tally, halved_steps=40)


def with_cuts(cuts):
    """First come, first served, with another greatest chunk in each step."""
    left = list(cuts)

    def decide(sched, state):
        limits = evolve(sched.limits, long_prefill_token_threshold=left.pop() if left else 0)
        todo, after = ops.schedule(evolve(sched, limits=limits), state)
        return todo, evolve(after, limits=sched.limits)

    return decide


def test_i11_everybody_preempted_at_any_step(kind, start, examples, tally):
    """At every third step of a run in turn; resumed in the same step or in a later one."""
    make, some = kind

    @examples(6)
    @given(some(), st.integers(0, 2), st.sampled_from((0, 2)))
    def holds(script, first, pause):
        model = make(script.plan)
        plain = play(script, *start(model, script.plan))
        for step in range(first, min(plain.counts["steps"], 24), 3):
            scheduler = preempting_all_at(step, lambda n: {6: 5, 3: pause}.get(n, 0))
            played = play(script, *start(model, script.plan), scheduler=scheduler)
            tally.update(played.counts)
            check_against_reference(model, script.plan, played.answers)

    holds()
    at_least(tally, runs=15, preemptions=20)


def preempting_all_at(step, choose):
    left = [step]

    def decide(sched, state):
        left[0] -= 1
        return adversarial_schedule(sched, state, choose) if left[0] == -1 else ops.schedule(sched, state)

    return decide


def test_i12_a_cached_block_holds_what_its_hash_says(start, examples, tally):
    """And a scheduler that finds prefixes gives the tokens of one that doesn't."""

    @examples(60)
    @given(scripts(aborts=True, same_ids=True))
    def holds(script):
        model = HashModel(script.plan.vocab_size, script.plan.max_model_len)
        group = script.plan.groups[0]
        known = {}

        def look(moment):
            rows = moment.after.rows
            for row in moment.prepared.rows.live().tolist():
                ids = rows.tokens[row]
                for at, block_hash in enumerate(prefix.hashes_of(ids, group.block_size, CacheKey())):
                    known[block_hash] = at, ids[at * group.block_size :][: group.block_size].tolist()
            for block, block_hash in moment.sched.pools[0].hashes.items():
                at, ids = known[block_hash]
                places = range(at * group.block_size, (at + 1) * group.block_size)
                layer = moment.kv.layers[0]
                assert layer.k[block].flatten().tolist() == ids
                assert layer.v[block].flatten().tolist() == list(places)

        for caching in (True, False):
            plan = evolve(script.plan, prefix_caching=caching)
            played = play(evolve(script, plan=plan), *start(model, plan), watch=look)
            tally.update({what: played.counts[what] * caching for what in played.counts})
            check_against_reference(model, plan, played.answers)
            assert caching or not played.counts["prefix_hits"]

    holds()
    at_least(tally, runs=60, prefix_hits=30, preemptions=5)


def test_i11_i12_i19_from_any_state_to_the_end(start, examples, tally):
    """At one step of a run: all preempted, a request that was there before once more, and copies of one beside all."""

    @examples(25)
    @given(scripts(adversarial=True), st.integers(0, 9), st.integers(0, 7), st.integers(1, 2))
    def holds(script, step, which, n):
        model = HashModel(script.plan.vocab_size, script.plan.max_model_len)
        env, kv = start(model, script.plan)
        left = [step]

        def look(moment):
            left[0] -= 1
            if left[0] != -1:
                return
            state, sched = moment.after.detach(), moment.sched
            check_preempted(state, sched, env, moment.kv)
            _, request = script.arrivals[which % len(script.arrivals)]
            check_hit(state, sched, env, moment.kv, evolve(request, request_id="once more"))
            rows = state.rows
            alive = [name for name, phase in zip(rows.request_ids, rows.phase, strict=True) if phase in ALIVE]
            if alive:
                check_forks(state, sched, env, moment.kv, alive[which % len(alive)], n)
            tally.update(states_looked_at=1, states_forked=bool(alive))

        tally.update(play(script, env, kv, watch=look).counts)

    holds()
    at_least(tally, states_looked_at=15, states_forked=10)


def test_i17_a_request_reads_no_block_but_its_own(kind, start, examples, tally):
    """With NaN in the blocks of all others, its logits keep their bits."""
    make, some = kind

    @examples(12)
    @given(some(adversarial=True))
    def holds(script):
        env, kv = start(make(script.plan), script.plan)
        most = range(len(script.requests))
        clones = [kv.clone() for _ in most]

        def look_alone(moment):
            for b in range(len(moment.schedule.request_ids)):
                check_isolated(moment, env, clones[b], b)
                tally["requests_alone"] += 1
            clones[:] = [moment.kv.clone() for _ in most]

        tally.update(play(script, env, kv, watch=look_alone).counts)

    holds()
    at_least(tally, requests_alone=80)
