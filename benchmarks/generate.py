"""Tokens a second of a whole generation, beside transformers: its `generate`, and its continuous `generate_batch`.

The same prompts of 64 seeded random ids each go through all three, 64 new tokens a prompt, greedy, in float32 on two
threads, one request and 32; the rounds are interleaved, and the medians make the ratios. `--quick` has shorter
prompts and outputs in the same proportion. transformers gets the same parameters: it reads a folder that is
written from what fstep has loaded. The tokens must be equal; where the two part, the gap between the two best logits
says whether it is rounding.

Where a decode step of 32 requests goes with the kernels in C, in milliseconds, two threads of a busy machine with
AVX-512: products 67, attention 21 (its 141 MB of KV come from memory), norms 4.3, KV write 2.9, silu 2.6, sampling 1.5,
rotation 1.2, host 1.2 of 107 in all. The products take 0.80 to 0.90 of the time of torch's (MKL, Intel)
at 32 rows and 1.08 to 1.18 of it at 2,048. What didn't help there: blocks of the columns, tiles of x copied beside each
other, tiles of 9 x 3 and 6 x 4 vectors in place of 14 x 2, other sizes of the block of x. What did: asking for the next
panel of the weight while one is worked on, and a task for every few panels in place of a fixed share for each thread.

What was tried for the products in torch, where there are no kernels in C: milliseconds of those of all 30 layers of
SmolLM2-135M (and of its LM head), each with the weights of its own layer, features-first activations, two threads of
a machine with AVX-512, medians of interleaved runs. `blocks` are batched products of 48 rows of the weight with all of
the transposed activations; 64 and 96 rows come within 5 % of it.

    tokens            1            2            8           32          128      256      2048
    linear(x, w)   23.9 (6.0)   54.0 (11.9)  46.9 (11.4)  68.9 (17.9)  155 (41)   302 (91)   2083
    w @ x.T        24.9 (6.0)   43.7 (12.8)  37.7 (12.4)  49.3 (13.1)  141 (36)   262 (80)   1957
    blocks         41.6 (9.8)   43.3 (10.4)  36.9 (9.9)   41.2 (10.1)  120 (32)   244 (84)   2840

So one token goes through `linear`, up to 256 through blocks, and more through `w @ x.T`. For attention over 32 requests
of 128 positions (milliseconds a layer): all of it 0.77, of which gathering K 0.25, its product 0.15, V 0.19 by
`embedding_bag`, which reads the cache in place, where gathering V and a batched product took 0.35.
The largest logit of 32 rows of 49,152: 4.1 with `max` over features-first logits, 0.34 in two stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from fstep import Engine, SamplingParams, demo_model
from fstep.models.checkpoint import Checkpoint, load_checkpoint
from fstep.models.dense import DenseConfig

Tokens = list[tuple[int, ...]]
Way = Callable[[list[list[int]], int], Tokens]


@frozen
class Run:
    """One generation, timed."""

    way: str
    requests: int
    round: int
    seconds: float
    tokens: int
    tokens_per_second: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_second", self.tokens / self.seconds)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    prompt_len, new_tokens, rounds = (16, 16, 1) if options.quick else (64, 64, options.rounds)
    path = options.model or demo_model()
    checkpoint = load_checkpoint(path)
    engine = Engine.from_checkpoint(checkpoint)
    model = _transformers_model(path, checkpoint)
    if model is None:
        print("this benchmark compares with transformers: pip install transformers safetensors", file=sys.stderr)
        return 1
    ways = {"fstep": _fstep(engine), "generate": _generate(model), "generate_batch": _generate_batch(model)}
    prompts = np.random.default_rng(0).integers(0, engine.env.model.vocab_size, (max(options.requests), prompt_len))
    runs, tokens = _measure(ways, prompts.tolist(), options.requests, new_tokens, rounds)

    kernels = f"{options.threads} threads, {getattr(engine.env.device.kernels, 'name', 'unnamed')} kernels"
    print(f"{prompt_len} prompt tokens, {new_tokens} new, float32, {kernels}, {rounds} rounds")
    figures = {n: _tokens_per_second(runs, n) for n in options.requests}
    _print_table(figures)
    agree = {way: _differences(model, prompts.tolist(), tokens["fstep"], tokens[way]) for way in list(ways)[1:]}
    for way, differences in agree.items():
        print(f"tokens of {way}: " + ("; ".join(differences) if differences else "all equal"))
    if options.json:
        options.json.write_text(json.dumps(_as_json(runs, figures, agree), indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32], help="requests at a time (1 and 32)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved runs of each way (3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--quick", action="store_true", help="one round of 16 prompt and 16 new tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


# The three ways ------------------------------------------------------------------------------------------------------


def _fstep(engine: Engine) -> Way:
    def run(prompts: list[list[int]], new_tokens: int) -> Tokens:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
        return [output.token_ids for output in outputs]

    return run


def _generate(model: Any) -> Way:
    def run(prompts: list[list[int]], new_tokens: int) -> Tokens:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_greedy(new_tokens))
        return [tuple(row) for row in made[:, ids.shape[1] :].tolist()]

    return run


def _generate_batch(model: Any) -> Way:
    """With a cache of the size that the requests need: otherwise it takes most of the memory, and clears that first."""
    from transformers import ContinuousBatchingConfig

    def run(prompts: list[list[int]], new_tokens: int) -> Tokens:
        pages = len(prompts) * (1 + (len(prompts[0]) + new_tokens) // 256)
        cache = ContinuousBatchingConfig(page_size=256, num_blocks=pages + 1, max_batch_tokens=2048)
        with torch.inference_mode():
            made = model.generate_batch(
                prompts, generation_config=_greedy(new_tokens), continuous_batching_config=cache, progress_bar=False
            )
        outputs = sorted(made.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return [tuple(output.generated_tokens) for output in outputs]

    return run


def _greedy(new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _transformers_model(path: Path, checkpoint: Checkpoint) -> Any:
    """transformers' model with the same parameters; None if it isn't installed."""
    warnings.simplefilter("ignore")
    try:
        import transformers
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if path.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        _write_llama(Path(folder), checkpoint)
        return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _write_llama(folder: Path, checkpoint: Checkpoint) -> None:
    """A checkpoint's parameters as a Hugging Face folder of a Llama."""
    from safetensors.torch import save_file

    config: Any = checkpoint.model.config
    if config.qk_norm or config.rope.scaling is not None:
        raise SystemExit("--model: a GGUF file of this architecture can't be turned into a Llama; give a folder")
    (folder / "config.json").write_text(json.dumps(_llama_config(config)))
    save_file(_llama_tensors(config, checkpoint.params), folder / "model.safetensors", {"format": "pt"})


def _llama_config(config: DenseConfig) -> dict[str, Any]:
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "mlp_bias"),
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": config.max_model_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "attention_bias": config.qkv_bias,
        **{name: getattr(config, name) for name in same},
    }


def _llama_tensors(config: DenseConfig, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    parts = {
        "self_attn": {"qkv_proj": (("q_proj", "k_proj", "v_proj"), [n * config.head_dim for n in heads])},
        "mlp": {"gate_up_proj": (("gate_proj", "up_proj"), [config.intermediate_size] * 2)},
    }
    parts["self_attn"]["o_proj"] = (("o_proj",), [config.hidden_size])
    parts["mlp"]["down_proj"] = (("down_proj",), [config.hidden_size])
    tensors = {"model.embed_tokens.weight": params["embed_tokens"], "model.norm.weight": params["norm"]}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = params["lm_head"]["weight"]
    for number, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = layer[norm]
        for block, products in parts.items():
            for product, (names, sizes) in products.items():
                for leaf, tensor in layer[product].items():
                    for name, part in zip(names, tensor.split(sizes), strict=True):
                        tensors[f"{prefix}{block}.{name}.{leaf}"] = part.contiguous()
    return tensors


# Figures -------------------------------------------------------------------------------------------------------------


def _measure(
    ways: Mapping[str, Way], prompts: list[list[int]], requests: Sequence[int], new_tokens: int, rounds: int
) -> tuple[list[Run], dict[str, Tokens]]:
    """All runs, and each way's tokens for the most requests."""
    runs: list[Run] = []
    tokens: dict[str, Tokens] = {}
    for way in ways.values():
        way(prompts[:2], 2)
    for round_ in range(rounds):
        for count in sorted(requests):
            order = list(ways)[round_ % 3 :] + list(ways)[: round_ % 3]
            for name in order:
                began = time.perf_counter()
                tokens[name] = ways[name](prompts[:count], new_tokens)
                runs.append(Run(name, count, round_, time.perf_counter() - began, count * new_tokens))
    return runs, tokens


def _tokens_per_second(runs: Sequence[Run], requests: int) -> dict[str, float]:
    by_way: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.requests == requests:
            by_way[run.way].append(run.tokens_per_second)
    return {way: statistics.median(each) for way, each in by_way.items()}


def _ratio(figures: Mapping[str, float]) -> float:
    """fstep's tokens a second over those of transformers' better way."""
    return figures["fstep"] / max(figures["generate"], figures["generate_batch"])


def _print_table(figures: Mapping[int, Mapping[str, float]]) -> None:
    ways = ("fstep", "generate", "generate_batch")
    heads = [*(f"{way} tok/s" for way in ways), *(f"over {way}" for way in ways[1:]), "ratio"]
    print(f"{'requests':>8}" + "".join(f"{head:>22}" for head in heads))
    for requests, each in figures.items():
        cells = [f"{each[way]:.1f}" for way in ways] + [f"{each['fstep'] / each[way]:.2f}" for way in ways[1:]]
        print(f"{requests:>8}" + "".join(f"{cell:>22}" for cell in [*cells, f"{_ratio(each):.2f}"]))


def _differences(model: Any, prompts: list[list[int]], ours: Tokens, theirs: Tokens) -> list[str]:
    """Where a request's tokens part for the first time, and how near the two best logits are there."""
    found: list[str] = []
    for number, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=False)):
        if a != b:
            at = next(n for n, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
            with torch.inference_mode():
                best = model(torch.tensor([[*prompt, *a[:at]]])).logits[0, -1].topk(2).values
            found.append(f"prompt {number} parts at token {at}, logit gap {float(best[0] - best[1]):.1e}")
    return found


def _as_json(
    runs: Sequence[Run], figures: Mapping[int, Mapping[str, float]], agree: Mapping[str, list[str]]
) -> dict[str, object]:
    fields = ("way", "requests", "round", "seconds", "tokens", "tokens_per_second")
    return {
        "ratio": {str(requests): _ratio(each) for requests, each in figures.items()},
        "tokens_per_second": {str(requests): dict(each) for requests, each in figures.items()},
        "differences": dict(agree),
        "runs": [{name: getattr(run, name) for name in fields} for run in runs],
    }


if __name__ == "__main__":
    sys.exit(main())
