"""The toy transformer through the step, against the same arithmetic on whole sequences."""

import torch

from fstep.shell import CpuDevice, Runner, new_kv, plan_for
from fstep.state import CacheConfig, Env, NewRequest, SamplingParams, SchedLimits
from fstep.testing.toy import ToyTransformer


def whole(params, ids):
    """Logits of the last position, without cache or batch."""
    states = params["embed"][ids] + params["position"][: len(ids)]
    unseen = torch.ones(len(ids), len(ids)).triu(1).bool()
    for weights in params["layers"]:
        q, k, v = (states @ weights[name].T for name in "qkv")
        states = states + (q @ k.T / k.shape[1] ** 0.5).masked_fill(unseen, -torch.inf).softmax(-1) @ v
        states = states + (states @ weights["up"].T).relu() @ weights["down"].T
    return (states @ params["embed"].T)[-1]


def test_greedy_tokens_in_chunks_and_batches():
    model = ToyTransformer()
    params, limits = model.init(), SchedLimits(max_num_seqs=3, max_num_batched_tokens=7)
    plan = plan_for(model, CacheConfig(block_size=4, num_blocks=12), limits)
    runner = Runner(Env(model, params, CpuDevice()), plan, limits, new_kv(plan, model.kv_specs(), CpuDevice()))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in (1, 9, 5, 14, 3)]
    for number, prompt in enumerate(prompts):
        runner.add(NewRequest(str(number), prompt, SamplingParams(temperature=0, max_tokens=10)))
    seen = [list(prompt) for prompt in prompts]
    while runner.has_unfinished():
        for event in runner.step().events:
            seen[int(event.request_id)] += event.token_ids
    for prompt, ids in zip(prompts, seen, strict=True):
        assert len(ids) == len(prompt) + 10
        for length in range(len(prompt), len(ids)):
            logits = whole(params, torch.tensor(ids[:length]))
            assert logits[ids[length]] >= logits.max() - 1e-4
