"""vLLM's own scheduler and KV-cache manager (0.32, V1) as a runner of `fstep.testing`, over a hash model.

Each `SchedulerOutput` becomes a `Schedule` by `from_vllm`, and fstep lays out its batch; the pages are a `HashCache`,
so a block or a count that is wrong becomes a wrong token, or a cell that nobody wrote. vLLM ends the requests itself.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fstep import ops
from fstep.interop import from_vllm
from fstep.ops.checks import arrays_of
from fstep.state import I32, BatchState, FinishReason, KVGroup, NewRequest, Plan, Sampled, Schedule, i32
from fstep.testing import (
    BatchArrays,
    HashCache,
    HashModel,
    PoolView,
    StepOutput,
    StepReport,
    reference_token,
    reference_tokens,
)

VOCAB_SIZE = 32
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


@cache
def config_of(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_blocks: int, caching: bool, policy: str
) -> VllmConfig:
    """vLLM's settings for a model that is a configuration file and no more."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA))
        model = ModelConfig(folder, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float32")
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=policy,
            watermark=0.0,
        )
        cache_config = CacheConfig(block_size=16, enable_prefix_caching=caching)
        made = VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
        )
    made.cache_config.num_gpu_blocks = num_blocks
    return made


class VllmRunner:
    """A `Runner`. Raises `ValueError` for a request that vLLM's front end would refuse."""

    def __init__(
        self,
        num_blocks: int = 9,
        block_size: int = 2,
        max_num_seqs: int = 3,
        max_num_batched_tokens: int = 5,
        max_model_len: int = 16,
        prefix_caching: bool = True,
        policy: str = "fcfs",
    ) -> None:
        config = config_of(max_num_seqs, max_num_batched_tokens, max_model_len, num_blocks, prefix_caching, policy)
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layout = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["0"], spec)])
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block_size, sha256) if prefix_caching else None
        self.scheduler = self.scheduler_of(config, layout)
        self.model = HashModel(VOCAB_SIZE, max_model_len)
        groups = (KVGroup(num_blocks, block_size),)
        self.cache = HashCache(self.model, groups)
        self.asked: dict[str, NewRequest] = {}
        self.state = BatchState.empty(Plan(VOCAB_SIZE, max_model_len, groups))

    def scheduler_of(self, config: VllmConfig, layout: KVCacheConfig) -> Scheduler:
        return Scheduler(
            config, layout, StructuredOutputManager(config), self.block_size, self.block_size, log_stats=False
        )

    def reference(self, request: NewRequest) -> tuple[tuple[int, ...], FinishReason]:
        """What the request must get, however it is scheduled."""
        prompt = request.prompt_token_ids.tolist()
        return reference_tokens(self.model.reference_logits, prompt, request.sampling, (), self.max_model_len)

    def add(self, request: NewRequest) -> None:
        name, prompt, asked = request.request_id, request.prompt_token_ids.tolist(), request.sampling
        longest = min(self.max_model_len, len(prompt) + (asked.max_tokens or self.max_model_len))
        if name in self.scheduler.requests:
            raise ValueError(f"request {name!r} is in use")
        if not 0 < len(prompt) < self.max_model_len or max(prompt) >= VOCAB_SIZE:
            raise ValueError(f"request {name!r}: its prompt can't be served")
        if -(-(longest - 1) // self.block_size) >= self.num_blocks:
            raise ValueError(f"request {name!r}: more tokens than all blocks hold")
        params = VllmSampling(
            temperature=0,
            max_tokens=asked.max_tokens or self.max_model_len,
            stop_token_ids=list(asked.stop_token_ids),
            ignore_eos=True,
        )
        self.asked[name] = request
        self.scheduler.add_request(
            Request(name, prompt, params, None, block_hasher=self.hasher, priority=request.priority)
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> StepReport:
        output = self.scheduler.schedule()
        pools = (self.pool(),)
        todo = from_vllm(output, self.state)
        state = ops.build_meta(ops.pad(ops.prepare(self.state, todo)))
        batch = arrays_of(state)
        self.forget_new(todo, batch.num_computed_tokens)
        sampled = self.sampled(state, batch)
        self.state, _ = ops.commit(state, sampled)
        by_name = {name: number for number, name in enumerate(todo.request_ids)}
        given = [ids.tolist()[:count] for ids, count in zip(sampled.token_ids, sampled.num_sampled, strict=True)]
        clients = self.scheduler.update_from_output(output, ModelRunnerOutput([*by_name], by_name, given))
        outputs = [as_output(each) for client in clients.values() for each in client.outputs]
        return StepReport(outputs, todo, batch, pools)

    def forget_new(self, todo: Schedule, num_computed_tokens: I32) -> None:
        """What lies in new blocks, those of a prefix hit apart, was somebody else's."""
        entering = {each.request_id for each in (*todo.new, *todo.resumed)}
        for b, name in enumerate(todo.request_ids):
            hit = num_computed_tokens[b] // self.block_size if name in entering else 0
            self.cache.forget(0, todo.new_blocks[0][b][hit:])

    def sampled(self, state: BatchState, batch: BatchArrays) -> Sampled:
        """A token for each request that is computed to its end."""
        inputs = state.need_step("sampled").inputs
        logits = self.cache.forward(batch, inputs.token_ids)
        drawn = [
            reference_token(each, self.asked[name].sampling, int(end))
            for each, name, end in zip(logits, batch.request_ids, batch.seq_lens, strict=True)
        ]
        tokens = np.where(inputs.discard, -1, np.array(drawn, np.int32))
        return Sampled(i32(tokens)[:, None], i32(~inputs.discard), i32(np.zeros(len(tokens))))

    def pool(self) -> PoolView:
        """The block pool once the schedule was made."""
        manager = self.scheduler.kv_cache_manager
        queue = manager.block_pool.free_block_queue.get_all_free_blocks()
        counts = np.array([each.ref_cnt for each in manager.block_pool.blocks], np.int32)
        counts[0] = 0  # the null block's is not kept
        held = {name: np.array(manager.get_block_ids(name)[0], np.int32) for name in self.scheduler.requests}
        return PoolView(
            self.num_blocks,
            np.array([each.block_id for each in queue if each.block_hash is None], np.int32),
            {name: blocks for name, blocks in held.items() if len(blocks)},
            np.array([each.block_id for each in queue if each.block_hash is not None], np.int32),
            counts,
        )


def as_output(output: EngineCoreOutput) -> StepOutput:
    reason = str(output.finish_reason) if output.finished else None
    return StepOutput(output.request_id, tuple(output.new_token_ids), reason)
