"""fstep against transformers: the same prompts, the same tokens, float32, in one run.

32 prompts of 64 random token ids, 64 new tokens each, greedy, 2 threads, the whole run with prefill; and 1 request. The
peers are transformers' batched `generate` and its continuous `generate_batch`, on a model with the very parameters that
fstep runs on. Rounds are interleaved; a cell is the median. Two float32 engines may part where the two best logits of a
position lie close; where they do is printed.

@@TABLE@@
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fstep import Engine, SamplingParams, demo_model

PROMPT_LEN, THREADS, SIZES = 64, 2, (1, 32)
PEERS = ("generate", "generate_batch")
Run = Callable[[list[list[int]], int], list[list[int]]]


def prompts(vocab_size: int, count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocab_size, (count, PROMPT_LEN)).tolist()


def fstep(engine: Engine) -> Run:
    def run(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [list(output.token_ids) for output in engine.generate(batch, params)]

    return run


def peers(engine: Engine) -> dict[str, Run]:
    """Transformers' two ways, over a Llama with the engine's parameters."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = _llama(engine, transformers)

    def config(new_tokens: int) -> Any:
        return transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=None
        )

    def generate(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(batch)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config(new_tokens))
        return made[:, PROMPT_LEN:].tolist()

    def generate_batch(batch: list[list[int]], new_tokens: int) -> list[list[int]]:
        made = model.generate_batch(batch, generation_config=config(new_tokens), progress_bar=False)
        by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in made.values()}
        return [by_prompt[tuple(prompt)] for prompt in batch]

    return {"generate": generate, "generate_batch": generate_batch}


def _llama(engine: Engine, transformers: Any) -> Any:
    config, params = engine.env.model.config, engine.env.params
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=width,
            max_position_embeddings=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
        )
    ).eval()
    tensors = {"model.embed_tokens.weight": params["embed_tokens"], "model.norm.weight": params["norm"]}
    tensors["lm_head.weight"] = params.get("lm_head", params["embed_tokens"])
    for number, layer in enumerate(params["layers"]):
        qkv = layer["qkv_proj"]["weight"].split([heads * width, kv_heads * width, kv_heads * width])
        gate_up = layer["gate_up_proj"]["weight"].chunk(2)
        named = dict(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv, strict=True))
        named |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), gate_up, strict=True))
        named |= {"self_attn.o_proj": layer["o_proj"]["weight"], "mlp.down_proj": layer["down_proj"]["weight"]}
        named |= {name: layer[name] for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in named.items()}
    model.load_state_dict(tensors)
    return model


def measure(runs: dict[str, Run], vocab_size: int, sizes: tuple[int, ...], new_tokens: int, rounds: int) -> dict[Any, Any]:
    """Seconds of every run by (size, name), and the tokens of the last one."""
    seconds: dict[Any, list[float]] = defaultdict(list)
    tokens: dict[Any, list[list[int]]] = {}
    for number in range(rounds):
        for size in sizes:
            batch = prompts(vocab_size, size)
            for name, run in runs.items():
                sys.stderr.write(f"\rround {number + 1} of {rounds}: {size} requests, {name}            ")
                began = time.perf_counter()
                tokens[size, name] = run(batch, new_tokens)
                seconds[size, name].append(time.perf_counter() - began)
    sys.stderr.write("\r" + " " * 60 + "\r")
    return {"seconds": seconds, "tokens": tokens}


def parted(ours: list[list[int]], theirs: list[list[int]]) -> list[tuple[int, int]]:
    """Where two runs first differ: (request, token)."""
    places = []
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            places.append((row, next(i for i in range(len(a)) if a[: i + 1] != b[: i + 1])))
    return places


def gap(engine: Engine, prompt: list[int], output: list[int], at: int) -> float:
    """How far the two best logits lie apart at the token where two runs part."""
    from fstep import NewRequest, ops

    kv = engine.kv.clone()
    state, sched = ops.adopt(engine.state, kv), engine.sched
    request = NewRequest("again", prompt + output[:at], SamplingParams(temperature=0, max_tokens=1))
    todo, _ = ops.schedule(ops.add(sched, state, request), state)
    state, _ = ops.forward(ops.build_meta(ops.pad(ops.prepare(state, todo))), engine.env, kv)
    best = state.step.output.logits[0].topk(2).values
    return float(best[0] - best[1])


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="PATH", help="a Llama-like checkpoint (the demo model)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of each request (64)")
    parser.add_argument("--quick", action="store_true", help="one round of 16 new tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    rounds, new_tokens = (1, 16) if options.quick else (options.rounds, options.new_tokens)

    torch.set_num_threads(THREADS)
    engine = Engine.from_pretrained(options.model or demo_model(), num_blocks=512)
    runs = {"fstep": fstep(engine), **peers(engine)}
    with torch.no_grad():
        for run in runs.values():  # what is set up at first use is not counted
            run(prompts(engine.env.model.vocab_size, 2), 2)
        measured = measure(runs, engine.env.model.vocab_size, SIZES, new_tokens, rounds)
    rates = {
        (size, name): size * new_tokens / statistics.median(measured["seconds"][size, name])
        for size in SIZES
        for name in runs
    }
    ratio = {size: rates[size, "fstep"] / max(rates[size, name] for name in PEERS) for size in SIZES}

    print(f"{PROMPT_LEN} + {new_tokens} tokens, greedy, float32, {THREADS} threads; tokens per second, medians of {rounds}")
    print(f"{'requests':>8}" + "".join(f"{name:>16}" for name in runs) + f"{'ratio to better':>18}")
    for size in SIZES:
        print(f"{size:>8}" + "".join(f"{rates[size, name]:>16.1f}" for name in runs) + f"{ratio[size]:>17.2f}x")
    for size in SIZES:
        batch, ours = prompts(engine.env.model.vocab_size, size), measured["tokens"][size, "fstep"]
        for name in PEERS:
            places = parted(ours, measured["tokens"][size, name])
            where = "".join(
                f"; request {row} parts at {at}, gap {gap(engine, batch[row], ours[row], at):.1e}" for row, at in places
            )
            print(f"{size} requests, fstep and {name}: {size - len(places)} of {size} equal{where}")
    if options.json:
        options.json.write_text(json.dumps(_as_json(rates, ratio, measured["seconds"]), indent=1) + "\n")
    return 0


def _as_json(rates: dict[Any, float], ratio: dict[int, float], seconds: dict[Any, list[float]]) -> dict[str, Any]:
    by_size: dict[str, Any] = {"ratio": {str(size): each for size, each in ratio.items()}}
    by_size["tokens_per_second"] = {f"{name} at {size}": rate for (size, name), rate in rates.items()}
    by_size["seconds"] = {f"{name} at {size}": each for (size, name), each in seconds.items()}
    return by_size


if __name__ == "__main__":
    sys.exit(main())
