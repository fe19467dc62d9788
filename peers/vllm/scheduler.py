"""vLLM's own scheduler and KV-cache manager (0.32, V1) as a runner of `fstep.testing`, over a hash model.

`VllmRunner` lays out the batch from each `SchedulerOutput` as a worker does, from what it was told of each request
since it came; the pages are a `HashCache`, so a block or a length that is wrong becomes a wrong token, or a cell that
nobody wrote. vLLM ends the requests itself.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from attrs import define, field
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fstep.state import FinishReason, KVGroup, NewRequest
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


@define
class Row:
    """What a worker knows of a request."""

    request: NewRequest
    known: list[int]  #: prompt and output
    num_computed: int
    blocks: list[int] = field(factory=list)


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
        self.cache = HashCache(self.model, (KVGroup(num_blocks, block_size),))
        self.asked: dict[str, NewRequest] = {}
        self.rows: dict[str, Row] = {}

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
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> StepReport:
        todo = self.scheduler.schedule()
        pools = (self.pool(),)
        self.told(todo)
        names = list(todo.num_scheduled_tokens)
        if not names:
            self.scheduler.update_from_output(todo, ModelRunnerOutput([], {}))
            return StepReport((), pools=pools)
        rows = [self.rows[name] for name in names]
        counts = [todo.num_scheduled_tokens[name] for name in names]
        batch = self.batch(names, rows, counts)
        ids = [row.known[row.num_computed :][:count] for row, count in zip(rows, counts, strict=True)]
        logits = self.cache.forward(batch, np.concatenate(ids).astype(np.int32))
        sampled = [self.token_of(row, count, each) for row, count, each in zip(rows, counts, logits, strict=True)]
        for row, count, made in zip(rows, counts, sampled, strict=True):
            row.num_computed += count
            row.known += made
        by_name = {name: number for number, name in enumerate(names)}
        ended = self.scheduler.update_from_output(todo, ModelRunnerOutput(names, by_name, sampled))
        outputs = [each for client in ended.values() for each in client.outputs]
        reports = [
            StepOutput(each.request_id, tuple(each.new_token_ids), str(each.finish_reason) if each.finished else None)
            for each in outputs
        ]
        return StepReport(reports, batch=batch, pools=pools)

    def told(self, todo: SchedulerOutput) -> None:
        """Takes over what the scheduler says of the requests."""
        for name in todo.finished_req_ids:
            self.rows.pop(name, None)
        for new in todo.scheduled_new_reqs:
            known = list(new.prefill_token_ids or new.prompt_token_ids)
            row = self.rows[new.req_id] = Row(self.asked[new.req_id], known, new.num_computed_tokens)
            self.take(row, new.block_ids[0], resumed=True)
        cached = todo.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.rows[name]
            row.num_computed = computed
            self.take(row, blocks[0] if blocks else [], name in cached.resumed_req_ids)

    def take(self, row: Row, blocks: list[int], resumed: bool) -> None:
        """New blocks of a request. Those behind its prefix hit hold nothing that anybody may read."""
        row.blocks = [] if resumed else row.blocks
        hit = row.num_computed // self.block_size if resumed else 0
        row.blocks += blocks
        self.cache.forget(0, np.array(blocks[hit:], np.int32))

    def token_of(self, row: Row, count: int, logits: np.ndarray) -> list[int]:
        """The token of a request that is computed to its end; none of one whose prompt goes on."""
        if row.num_computed + count < len(row.known):
            return []
        return [reference_token(logits, row.request.sampling, len(row.known), row.request.sample_index)]

    def batch(self, names: list[str], rows: list[Row], counts: list[int]) -> BatchArrays:
        computed = np.array([row.num_computed for row in rows], np.int32)
        known = np.array([len(row.known) for row in rows], np.int32)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        table = np.zeros((len(rows), -(-self.max_model_len // self.block_size)), np.int32)
        for b, row in enumerate(rows):
            table[b, : len(row.blocks)] = row.blocks
        of_token = np.repeat(np.arange(len(rows)), counts).astype(np.int32)
        positions = (np.arange(starts[-1]) - starts[of_token] + computed[of_token]).astype(np.int32)
        slots = table[of_token, positions // self.block_size] * self.block_size + positions % self.block_size
        return BatchArrays(
            row_of_token=of_token,
            positions=positions,
            query_start_loc=starts,
            seq_lens=computed + np.diff(starts),
            logits_indices=starts[1:] - 1,
            slot_mapping=(slots.astype(np.int32),),
            block_tables=(table,),
            block_sizes=(self.block_size,),
            num_computed_tokens=computed,
            discard=computed + np.diff(starts) < known,
            num_known_tokens=known,
            request_ids=tuple(names),
        )

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
