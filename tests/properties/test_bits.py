"""The kernels in C, in whole runs: a position gets the same bits in every batch, chunk and number of threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fstep import Engine, SamplingParams, ops
from fstep.models.checkpoint import Checkpoint
from fstep.models.dense import DenseConfig, DenseDecoder, assemble, tensor_shapes
from fstep.shell.cpu import CpuDevice
from fstep.shell.native import ISAS, NativeKernels, load_library
from fstep.state import CacheConfig, NewRequest, SchedLimits

CONFIG = DenseConfig(
    vocab_size=61,
    hidden_size=96,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_model_len=96,
)


def checkpoint() -> Checkpoint:
    noise = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=noise) / 4 for name, shape in tensor_shapes(CONFIG).items()}
    return Checkpoint(DenseDecoder(CONFIG), assemble(CONFIG, tensors.keys(), tensors.__getitem__), (), None)


CHECKPOINT = checkpoint()
IDS = st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=70)
SETS = [load_library(isa) for isa in ISAS[: load_library().isa + 1]] if load_library() else []


def bits_by_position(kernels, prompts, limits, num_blocks, threads):
    """The last hidden state of each position of each request: all the bits that any run of it gave."""
    cache = CacheConfig(block_size=4, num_blocks=num_blocks, max_model_len=CONFIG.max_model_len)
    engine = Engine.from_checkpoint(CHECKPOINT, CpuDevice(kernels), limits, cache)
    state, sched, kv, env = engine.state, engine.sched, engine.kv, engine.env
    for name, prompt in prompts.items():
        request = NewRequest(name, tuple(prompt), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        sched = ops.add(sched, state, request)
    found: dict[tuple[str, int], set[bytes]] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        while ops.has_work(sched, state):
            todo, sched = ops.schedule(sched, state)
            state = ops.build_meta(ops.pad(ops.prepare(state, todo)))
            state, kv = ops.forward(state, env, kv, taps=("norm",))
            inputs = state.step.inputs
            names = [state.rows.request_ids[row] for row in inputs.rows.repeat(inputs.num_scheduled_tokens).tolist()]
            hidden = state.step.output.taps.get("norm", ())  # no forward in an empty step
            for name, position, bits in zip(names, inputs.positions.tolist(), hidden, strict=True):
                found.setdefault((name, position), set()).add(bits.numpy().tobytes())
            state = ops.sample(state, env)
            state, _ = ops.commit(state, ops.fetch(state, env))
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("library", SETS, ids=lambda library: ISAS[library.isa])
def test_bits_do_not_depend_on_the_schedule(library, examples):
    kernels = NativeKernels(library)

    @examples(15)
    @given(
        IDS,
        st.lists(st.tuples(st.integers(0, 70), IDS), min_size=1, max_size=6),
        st.builds(SchedLimits, st.integers(1, 6), st.integers(1, 200), st.integers(0, 30)),
        st.integers(20, 60),
        st.integers(1, 2),
    )
    def holds(stem, prompts, limits, num_blocks, threads):
        named = {str(number): (stem[:shared] + own)[:70] for number, (shared, own) in enumerate(prompts)}
        found = bits_by_position(kernels, named, limits, num_blocks, threads)
        alone = {}
        for name, prompt in named.items():
            alone |= bits_by_position(kernels, {name: prompt}, SchedLimits(), 60, 1)
        assert all(bits == alone[place] and len(bits) == 1 for place, bits in found.items())
        for name, prompt in named.items():
            assert (name, len(prompt) - 1) in found  # what the prefix cache gave isn't computed, but the last token is

    holds()
