"""The hash models: the same logits from the cache, chunk by chunk, as from a list of ids; NaN for what is nobody's."""

import numpy as np
import pytest
import torch

from fstep import ops
from fstep.shell.cpu import CpuDevice
from fstep.shell.kv import new_kv
from fstep.state import (
    BatchDescriptor,
    BatchState,
    Env,
    KVGroup,
    NewRequest,
    Plan,
    Ragged,
    SamplingParams,
    Schedule,
    Tail,
    i32,
)
from fstep.testing import HashModel, RollingModel

V = 50
IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5)
MODELS = (HashModel(V, 16), HashModel(V, 16, (0, 0, 0)), RollingModel(V, 16))


class Alone:
    """One request of `IDS` on a model, forward by forward, in blocks 3, 1, 4, 2, 5 of two tokens."""

    def __init__(self, model, **plan):
        layers = tuple(range(len(model.kv_specs())))
        self.plan = Plan(V, 16, (KVGroup(6, 2, layers),), **plan)
        self.env = Env(model, {}, CpuDevice())
        self.kv = new_kv(self.plan, model.kv_specs(), self.env.device)
        for layer in self.kv.layers:
            layer.k.fill_(float("nan"))
            layer.v.fill_(float("nan"))
        self.state = BatchState.empty(self.plan, self.kv.line, self.kv.epoch)
        request = NewRequest("a", IDS, SamplingParams(temperature=0))
        self.more = {"new": (request,), "new_blocks": (Ragged.of([(3, 1, 4, 2, 5)]),)}

    def forward(self, count, taps=()):
        todo = Schedule(request_ids=("a",), num_scheduled_tokens=i32([count]), **self.more)
        self.more = {}
        state = ops.build_meta(ops.pad(ops.prepare(self.state, todo)))
        state, self.kv = ops.forward(state, self.env, self.kv, taps)
        sampled = ops.sample(state, self.env)
        self.state, _ = ops.commit(sampled, ops.fetch(sampled, self.env))
        return state.step.output


def hash_id(model):
    return repr(model)


@pytest.mark.parametrize("model", MODELS, ids=hash_id)
@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1, 1, 3, 4), (1,) * 9], ids=str)
def test_logits_from_the_cache_are_those_from_the_ids(model, chunks):
    alone = Alone(model)
    seen = 0
    for count in chunks:
        seen += count
        expected = model.reference_logits(IDS[:seen])
        assert np.array_equal(alone.forward(count).logits.numpy(), expected[None])


@pytest.mark.parametrize("model", MODELS, ids=hash_id)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("size", [(9, 4), (12, 1), (16, 3)], ids=str)
def test_padding_changes_nothing(model, tail, size):
    alone = Alone(model, tail=tail, capture=(BatchDescriptor(*size),))
    assert np.array_equal(alone.forward(9).logits.numpy(), model.reference_logits(IDS)[None])


@pytest.mark.parametrize("model", MODELS, ids=hash_id)
def test_nan_in_one_cell_that_is_read_makes_all_logits_nan(model):
    alone = Alone(model)
    alone.forward(4)
    last = alone.kv.layers[-1].k
    last[1, 0, 1, 0] = float("nan")  # token 3, in the second block
    assert alone.forward(2).logits.isnan().all()


@pytest.mark.parametrize("model", MODELS, ids=hash_id)
def test_a_changed_cell_changes_the_logits(model):
    alone = Alone(model)
    alone.forward(4)
    alone.kv.layers[0].k[1, 0, 1, 0] += 1
    assert not np.array_equal(alone.forward(2).logits.numpy()[0], model.reference_logits(IDS[:6]))


@pytest.mark.parametrize("model", MODELS, ids=hash_id)
def test_taps_are_named_and_batched(model):
    layers = [f"layers.{number}" for number in range(len(model.kv_specs()))]
    output = Alone(model).forward(5, tuple(layers))
    assert list(output.taps) == layers
    assert all(tap.shape == (5,) and not tap.isnan().any() for tap in output.taps.values())
    with pytest.raises(ValueError, match=r"no tap 'layers\.7': this model has layers\.0"):
        Alone(model).forward(5, ("layers.7",))


@pytest.mark.parametrize("model", MODELS, ids=hash_id)
def test_logits_are_spread_and_depend_on_every_token(model):
    """Uniform in [0, 8): the mean of 2,000 lies within 0.3 of 4 but for a chance of 1e-8 (it deviates by 0.05)."""
    prefixes = [(first, second) for first in range(20) for second in range(2)]
    logits = np.stack([model.reference_logits(prefix) for prefix in prefixes])
    assert logits.dtype == np.float32
    assert 0 <= logits.min() < 0.2
    assert 7.8 < logits.max() < 8
    assert abs(logits.mean() - 4) < 0.3
    assert len(np.unique(logits, axis=0)) == len(prefixes)


def test_the_order_of_tokens_counts():
    for model in MODELS:
        assert not np.array_equal(model.reference_logits((1, 2)), model.reference_logits((2, 1)))
        assert not np.array_equal(model.reference_logits((1, 1)), model.reference_logits((1,)))


def test_every_layer_counts():
    logits = [HashModel(V, 16, (0,) * depth).reference_logits(IDS) for depth in (1, 2, 3)]
    assert len({each.tobytes() for each in logits}) == 3


def test_hidden_states_of_padded_tokens_are_nan():
    model = HashModel(V, 16)
    alone = Alone(model, capture=(BatchDescriptor(6, 2),))
    tap = alone.forward(4, ("layers.0",)).taps["layers.0"]
    assert torch.equal(tap.isnan(), torch.tensor([False] * 4 + [True] * 2))
