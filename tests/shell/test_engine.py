"""The engine over a small model: requests that fail alone, end in every way, and leave nothing behind."""

import numpy as np
import pytest
from attrs import evolve

from fstep import demo_model, ops
from fstep.models.checkpoint import Checkpoint
from fstep.shell import CpuDevice, Engine
from fstep.state import CacheConfig, ConfigError, DeviceError, FinishReason, RequestError, SamplingParams, SchedLimits
from fstep.testing.toy import ToyTransformer

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def toy_engine(limits=None, device=None, **cache):
    model = ToyTransformer()
    checkpoint = Checkpoint(model, model.init(), (), None)
    sizes = CacheConfig(**{"block_size": 4, "num_blocks": 12, **cache})
    return Engine.from_checkpoint(checkpoint, device or CpuDevice(), limits or SchedLimits(), sizes)


@pytest.fixture
def engine():
    return toy_engine()


def idle(engine):
    sched = engine.sched
    assert not engine.has_unfinished()
    assert not engine.state.rows.phase.any()
    assert [pool.num_free for pool in sched.pools] == [pool.num_blocks - 1 for pool in sched.pools]
    return True


@pytest.fixture(scope="module")
def smollm2():
    return Engine.from_pretrained(demo_model(), num_blocks=64)


def test_outputs_come_in_the_order_of_the_prompts_and_bad_ones_fail_alone(engine):
    prompts = [[1, 2, 3], [], [1, 99], [5] * 200, [4], [1.5], "text"]
    outputs = engine.generate(prompts, GREEDY)
    assert [each.finish_reason for each in outputs] == ["length", *["error"] * 3, "length", *["error"] * 2]
    assert [len(each.token_ids) for each in outputs] == [6, 0, 0, 0, 6, 0, 0]
    messages = [each.error for each in outputs if each.error]
    assert [message.split(": ")[1].split("=")[0] for message in messages] == [
        "prompt_token_ids",
        "prompt_token_ids[1]",
        "prompt length",
        "prompt_token_ids",
        "prompt",
    ]
    assert all(f"'{each.request_id}'" in each.error for each in outputs if each.error)
    assert [each.token_ids for each in (outputs[0], outputs[4])] == [
        toy_engine().generate([prompt], GREEDY)[0].token_ids for prompt in ([1, 2, 3], [4])
    ]
    assert idle(engine)


def test_arrays_of_any_integers_are_prompts(engine):
    for dtype in (np.int64, np.uint16):
        assert engine.generate([np.array([1, 2, 3], dtype)], GREEDY)[0].prompt_token_ids == (1, 2, 3)


def test_a_seed_is_given_and_reported_and_gives_the_same_tokens_again(engine):
    first = engine.generate([[1, 2]], SamplingParams(temperature=3, max_tokens=12))[0]
    again = engine.generate([[9]] * 3 + [[1, 2]], SamplingParams(temperature=3, max_tokens=12, seed=first.seed))[-1]
    other = engine.generate([[1, 2]], SamplingParams(temperature=3, max_tokens=12))[0]
    assert first.token_ids == again.token_ids != other.token_ids


def test_preemption_is_counted_and_changes_no_token():
    roomy, tight = toy_engine(num_blocks=64), toy_engine(num_blocks=5)
    prompts = [[number] * 7 for number in range(1, 5)]
    params = SamplingParams(temperature=2, seed=1, max_tokens=8)
    assert [each.token_ids for each in roomy.generate(prompts, params)] == [
        each.token_ids for each in tight.generate(prompts, params)
    ]
    assert (roomy.figures.preemptions, tight.figures.preemptions > 0) == (0, True)
    assert tight.figures.peak_blocks <= 5
    assert tight.figures.output_tokens == 32
    assert tight.figures.cached_tokens == 0  # what a request finds again of its own is no hit


def test_what_the_prefix_cache_gave_is_counted():
    engine = toy_engine(num_blocks=64, block_size=4)
    prompt = list(range(1, 11))
    first, again = (engine.generate([prompt], evolve(GREEDY, max_tokens=3)) for _ in range(2))
    assert first[0].token_ids == again[0].token_ids
    assert (engine.figures.prompt_tokens, engine.figures.cached_tokens) == (20, 8)
    without = toy_engine(num_blocks=64, block_size=4, enable_prefix_caching=False)
    assert [without.generate([prompt], evolve(GREEDY, max_tokens=3))[0].token_ids for _ in range(2)][1] == first[
        0
    ].token_ids
    assert without.figures.cached_tokens == 0


def test_abort_in_every_phase_is_one_end(engine):
    names = [engine.add([1, 2, 3], evolve(GREEDY, max_tokens=9)) for _ in range(3)]
    assert engine.abort(names[0]).token_ids == ()  # before a step
    engine.step()
    aborted = engine.abort(names[1])
    assert (aborted.finish_reason, len(aborted.token_ids)) == (FinishReason.ABORT, 1)
    assert engine.abort(names[1]) is None
    later = [output for _ in range(9) for output in engine.step()]
    assert {output.request_id for output in later} == {names[2]}
    assert engine.abort(names[2]) is None  # it has ended
    assert idle(engine)


def test_the_last_abort_leaves_nothing_behind(engine):
    name = engine.add([1, 2, 3], GREEDY)
    engine.step()
    engine.abort(name)
    assert idle(engine)
    assert engine.add([4, 5, 6], GREEDY, name) == name
    while engine.has_unfinished():
        last = engine.step()
    assert last[0].token_ids == toy_engine().generate([[4, 5, 6]], GREEDY)[0].token_ids


def test_an_id_in_use_is_refused(engine):
    engine.add([1], GREEDY, "x")
    with pytest.raises(RequestError, match="request 'x': request_id='x': is in use"):
        engine.add([1], GREEDY, "x")


def test_a_stream_that_nobody_listens_to_any_more_is_aborted(engine):
    stream = engine.stream([[1, 2], [3]], GREEDY)
    next(stream)
    stream.close()
    assert idle(engine)


def test_requests_added_by_hand_are_not_lost_in_a_stream(engine):
    name = engine.add([1, 2], GREEDY)
    engine.generate([[3], [4]], GREEDY)
    mine = []
    while engine.has_unfinished():
        mine += [output for output in engine.step() if output.request_id == name]
    assert [output.finished for output in mine] == [False] * 5 + [True]


def test_a_step_that_raised_can_be_tried_again(engine):
    expected = toy_engine().generate([[1, 2, 3]], GREEDY)[0].token_ids
    engine.add([1, 2, 3], GREEDY)
    engine.step()
    env, before = engine.env, (engine.state, engine.sched, engine.kv)
    engine.runner.env = evolve(env, params={})
    with pytest.raises(KeyError):
        engine.step()
    assert (engine.state, engine.sched, engine.kv) == before
    engine.runner.env = env
    while engine.has_unfinished():
        outputs = engine.step()
    assert outputs[0].token_ids == expected


class Failing(CpuDevice):
    """A CPU whose transfers fail when they are told to."""

    __slots__ = ("fails",)

    def put(self, arrays):
        self._check("put")
        return super().put(arrays)

    def get(self, tensors):
        self._check("get")
        return super().get(tensors)

    def _check(self, verb):
        if self.fails and self.fails[-1] == verb:
            raise DeviceError(self.fails.pop())
        if self.fails and self.fails[-1] == "let one through":
            self.fails.pop()


@pytest.mark.parametrize("fails", [["put"], ["put", "let one through"], ["get"]], ids=["forward", "sample", "fetch"])
@pytest.mark.parametrize("change", ["nothing", "an abort", "a new request"])
def test_a_device_that_fails_in_any_phase_loses_nothing(fails, change):
    """Whatever phase fails, and whatever is asked for before the next try, each request gives its own tokens."""
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(temperature=2, seed=5, max_tokens=6)
    expected = [each.token_ids for each in toy_engine().generate(prompts, params)]
    device = Failing()
    object.__setattr__(device, "fails", [])
    engine = toy_engine(device=device)
    names = [engine.add(prompt, params) for prompt in prompts]
    newest = {output.request_id: output for output in engine.step() + engine.step()}
    before = engine.state.digest()
    device.fails.extend(fails)
    with pytest.raises(DeviceError):
        engine.step()
    assert (engine.state.digest(), device.fails) == (before, [])
    if change == "an abort":
        engine.abort(names[1])
    if change == "a new request":
        names.append(engine.add(prompts[0], params))
    while engine.has_unfinished():
        newest |= {output.request_id: output for output in engine.step()}
    assert newest[names[0]].token_ids == expected[0]
    assert newest[names[1]].token_ids == (expected[1][:2] if change == "an abort" else expected[1])
    assert all(newest[name].token_ids == expected[0] for name in names[2:])
    assert idle(engine)


def test_the_step_functions_go_on_where_the_engine_is(engine):
    engine.add([1, 2, 3], GREEDY)
    engine.step()
    state, sched, kv = engine.state, engine.sched, engine.kv.clone()
    _, _, _, _, events = ops.step(ops.adopt(state, kv), sched, engine.env, kv)
    assert events[0].token_ids == engine.step()[0].token_ids[-1:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: must be at least 1"),
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"num_blocks": 0}, "num_blocks=0: must be at least 1"),
        ({"max_model_len": 9000}, "max_model_len=9000: the model allows at most 8192"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(demo_model(), **settings)


def test_an_unknown_setting_is_named():
    with pytest.raises(TypeError, match=r"unknown settings \['max_seqs'\]: there are \['block_size', "):
        Engine.from_pretrained(demo_model(), max_seqs=3)


def test_a_stop_string_ends_a_request_and_frees_it(smollm2):
    params = SamplingParams(temperature=0, max_tokens=40, stop=["\n\n"])
    output = smollm2.generate(["The capital of France is"], params)[0]
    assert (output.text, output.finish_reason, output.error) == (" Paris.", FinishReason.STOP, None)
    assert idle(smollm2)


def test_deltas_joined_are_the_text(smollm2):
    deltas = {}
    for output in smollm2.stream(
        ["Smileys: 😀 🔥", "Once upon a time"], SamplingParams(temperature=1, seed=3, max_tokens=24)
    ):
        deltas[output.request_id] = deltas.get(output.request_id, "") + output.delta
        last = output
        assert "\ufffd" not in output.delta or output.finished
    assert deltas[last.request_id] == last.text
    assert smollm2.tokenizer.decode(last.token_ids) == last.text
