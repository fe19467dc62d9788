"""Objects with the fields of vLLM's and FastDeploy's, and our own schedules told in them."""

import enum

from attrs import define, field

from fstep.state import RowPhase


@define
class VllmSampling:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list | None = None
    stop_token_ids: list | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict | None = None
    allowed_token_ids: list | None = None
    bad_words: list | None = None
    structured_outputs: object = None
    extra_args: dict | None = None


@define
class VllmNew:
    req_id: str
    prompt_token_ids: list | None
    block_ids: tuple
    sampling_params: VllmSampling | None = field(factory=VllmSampling)
    mm_features: list = field(factory=list)
    pooling_params: object = None
    num_computed_tokens: int = 0
    lora_request: object = None
    prompt_embeds: object = None
    prefill_token_ids: list | None = None


@define
class VllmCached:
    req_ids: list = field(factory=list)
    resumed_req_ids: set = field(factory=set)
    new_token_ids: list = field(factory=list)
    all_token_ids: dict = field(factory=dict)
    new_block_ids: list = field(factory=list)
    num_computed_tokens: list = field(factory=list)
    num_output_tokens: list = field(factory=list)


@define
class VllmOutput:
    scheduled_new_reqs: list = field(factory=list)
    scheduled_cached_reqs: VllmCached = field(factory=VllmCached)
    num_scheduled_tokens: dict = field(factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict = field(factory=dict)
    scheduled_encoder_inputs: dict = field(factory=dict)
    num_common_prefix_blocks: list = field(factory=list)
    finished_req_ids: set = field(factory=set)
    free_encoder_mm_hashes: list = field(factory=list)
    preempted_req_ids: set | None = None
    pending_structured_output_tokens: bool = False
    kv_connector_metadata: object = None
    ec_connector_metadata: object = None


def vllm_sampling(params):
    return VllmSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        seed=params.seed,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        max_tokens=params.max_tokens,
    )


def told_by_vllm(todo, state, second_runner=False):
    """A `Schedule` for a state, as vLLM's scheduler would tell it to its first or its second runner."""
    rows = state.rows
    new = {each.request_id: each for each in todo.new}
    back = {each.request_id: each.num_computed_tokens for each in todo.resumed}
    blocks = {name: tuple(group[b].tolist() for group in todo.new_blocks) for b, name in enumerate(todo.request_ids)}
    output = VllmOutput(
        num_scheduled_tokens=dict(zip(todo.request_ids, todo.num_scheduled_tokens.tolist(), strict=True)),
        total_num_scheduled_tokens=int(todo.num_scheduled_tokens.sum()),
        finished_req_ids={each.request_id for each in todo.finished},
        preempted_req_ids=set(todo.preempted),
    )
    for name in todo.request_ids:
        if name in new:
            told = VllmNew(name, new[name].prompt_token_ids.tolist(), blocks[name], vllm_sampling(new[name].sampling))
            told.num_computed_tokens = new[name].num_computed_tokens
            output.scheduled_new_reqs.append(told)
            continue
        row = rows.request_ids.row_of[name]
        known = rows.tokens[row].tolist()
        if name in back and second_runner:
            prompt = known[: rows.prompt_len[row]]
            told = VllmNew(name, prompt, blocks[name], num_computed_tokens=back[name], prefill_token_ids=known)
            output.scheduled_new_reqs.append(told)
            continue
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(name)
        cached.new_block_ids.append(blocks[name] if any(blocks[name]) else None)
        cached.num_computed_tokens.append(back.get(name, int(rows.num_computed_tokens[row])))
        cached.num_output_tokens.append(int(rows.num_tokens[row] - rows.prompt_len[row]))
        if name in back:
            cached.resumed_req_ids.add(name)
    return output


class RequestType(enum.Enum):
    PREFILL = 0
    DECODE = 1
    PREEMPTED = 2
    EXTEND = 3


@define
class FastDeploySampling:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = 1
    bad_words_token_ids: list | None = None
    prompt_logprobs: int | None = None


@define
class FastDeployTask:
    request_id: str
    task_type: RequestType
    block_tables: list = field(factory=list)
    prefill_start_index: int = 0
    prefill_end_index: int = 0
    prompt_token_ids: list = field(factory=list)
    output_token_ids: list = field(factory=list)
    sampling_params: FastDeploySampling = field(factory=FastDeploySampling)
    eos_token_ids: list | None = None
    guided_json: object = None
    pooling_params: object = None
    multimodal_inputs: object = None
    enable_thinking: bool | None = None


def fastdeploy_sampling(params):
    return FastDeploySampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
    )


def told_by_fastdeploy(todo, state, plan):
    """A `Schedule` that lets every decode run, as FastDeploy's scheduler would tell it. Its block 0 is our block 1."""
    rows = state.rows
    new = {each.request_id: each for each in todo.new}
    back = {each.request_id: each.num_computed_tokens for each in todo.resumed}
    tasks = [FastDeployTask(name, RequestType.PREEMPTED) for name in todo.preempted]
    for b, name in enumerate(todo.request_ids):
        count, more = int(todo.num_scheduled_tokens[b]), (todo.new_blocks[0][b] - 1).tolist()
        if name in new:
            params = new[name].sampling
            ends = [*params.stop_token_ids, *(() if params.ignore_eos else plan.eos_token_ids)]
            prompt, sampling = new[name].prompt_token_ids.tolist(), fastdeploy_sampling(params)
            start = new[name].num_computed_tokens
            told = FastDeployTask(name, RequestType.PREFILL, more, start, start + count, prompt, [], sampling, ends)
            tasks.append(told)
            continue
        row = rows.request_ids.row_of[name]
        start = back.get(name, int(rows.num_computed_tokens[row]))
        table = (rows.blocks[0][row] - 1).tolist() + more
        if name in back or start < rows.prefill_len[row]:
            known, split = rows.tokens[row].tolist(), int(rows.prompt_len[row])
            told = FastDeployTask(name, RequestType.PREFILL, table, start, start + count, known[:split], known[split:])
            tasks.append(told)
        elif more:
            tasks.append(FastDeployTask(name, RequestType.DECODE, table))
    ended = [each.request_id for each in todo.finished]
    aborted = [name for name in ended if rows.phase[rows.request_ids.row_of[name]] < RowPhase.STOPPED]
    return tasks, aborted
