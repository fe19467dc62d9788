"""`Engine`: text in, text out, over a `Runner`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TypeAlias

import numpy as np
from attrs import asdict, define, evolve, fields, frozen
from numpy.typing import NDArray

from fstep.models.checkpoint import Checkpoint, load_checkpoint, placed
from fstep.models.tokenizer import Tokenizer
from fstep.shell.cpu import CpuDevice
from fstep.shell.detokenizer import Detokenizer
from fstep.shell.kv import new_kv
from fstep.shell.runner import Runner
from fstep.shell.sizing import plan_for
from fstep.shell.traced import TracedRunner
from fstep.state import (
    KV,
    BatchState,
    CacheConfig,
    Device,
    Env,
    FinishReason,
    NewRequest,
    RequestError,
    RowEvent,
    SamplingParams,
    SchedLimits,
    SchedState,
    Tree,
)

Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer]


@frozen
class RequestOutput:
    """A request as far as it has come. `token_ids` and `text` are its output so far, `delta` what this step added."""

    request_id: str
    prompt: str | None  #: None if the request came as token ids
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()  #: with the stop token, if one ended it
    text: str = ""  #: without special tokens, and up to the stop string
    delta: str = ""
    finish_reason: FinishReason | None = None  #: None while it runs
    error: str | None = None
    seed: int | None = None  #: of the request's noise: with it the same tokens come again
    weights_versions: tuple[int, ...] = ()  #: with which each token was drawn

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@frozen
class Figures:
    """What an engine has done since it was made."""

    prompt_tokens: int = 0  #: of the requests that were taken
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0  #: of the prompts, found in the prefix cache
    peak_blocks: int = 0  #: most KV blocks that were in use at once
    num_blocks: int = 0  #: KV blocks there are
    seconds: float = 0.0  #: spent in steps


@define(eq=False)
class _Live:
    """A request that has not ended: its output so far, and the text that is not out yet."""

    output: RequestOutput
    detokenizer: Detokenizer | None


class Engine:
    """A model that answers prompts, many at a time. Made by `from_pretrained`, or from parts.

    `add`, `step` and `abort` drive it step by step, `generate` and `stream` are loops over them. Between steps
    `state`, `sched` and `kv` are the newest values, and `env` is what the step functions need beside them.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None = None) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.figures = Figures(num_blocks=sum(pool.num_blocks - 1 for pool in runner.sched.pools))
        self._live: dict[str, _Live] = {}
        self._numbers = count()
        self._held: tuple[RequestOutput, ...] = ()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: Device | None = None,
        limits: SchedLimits | None = None,
        cache: CacheConfig | None = None,
        check: str = "cheap",
        trace: str | Path | None = None,
        **settings: int | str | None,
    ) -> Engine:
        """An engine for a Hugging Face folder (config.json and safetensors) or a GGUF file.

        `settings` are fields of `SchedLimits` and `CacheConfig` by name (`max_num_seqs=8, num_blocks=512`). `check`
        says how much of each step is checked: "full", "cheap" or "off" (see `Runner`). `trace` is a file that the run
        is written to (see `fstep.shell.trace`). Raises `CheckpointError` if the model can't be read, `ConfigError` for
        a setting out of its range.
        """
        limits, cache = _configured(limits or SchedLimits(), cache or CacheConfig(), settings)
        return cls.from_checkpoint(load_checkpoint(Path(path)), device, limits, cache, check, trace, str(path))

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        device: Device | None = None,
        limits: SchedLimits | None = None,
        cache: CacheConfig | None = None,
        check: str = "cheap",
        trace: str | Path | None = None,
        name: str = "",
    ) -> Engine:
        """An engine for a model that is in memory already; `name` is how a trace calls it."""
        device, limits, cache = device or CpuDevice(), limits or SchedLimits(), cache or CacheConfig()
        model = checkpoint.model
        plan = plan_for(model, cache, limits, checkpoint.eos_token_ids)
        kv = new_kv(plan, model.kv_specs(), device)
        params = placed(checkpoint.params, device.kernels)
        env = Env(model, params, device)
        if trace is None:
            return cls(Runner(env, plan, limits, kv, check), checkpoint.tokenizer)
        settings = {**asdict(limits), **asdict(cache), "num_blocks": plan.groups[0].num_blocks - 1}
        about = {"model": name, "settings": settings}
        runner = TracedRunner(env, plan, limits, kv, check, path=trace, about=about)
        return cls(runner, checkpoint.tokenizer)

    @property
    def state(self) -> BatchState:
        return self.runner.state

    @property
    def sched(self) -> SchedState:
        return self.runner.sched

    @property
    def env(self) -> Env:
        return self.runner.env

    @property
    def kv(self) -> KV:
        return self.runner.kv

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> str:
        """Queues a prompt, text or token ids, and returns its request id.

        `add_special_tokens` is for text: whether the tokenizer may put its BOS in front. Raises `RequestError` naming
        the request, the field, the value and the limit; nothing is queued then.
        """
        name = self._new_name() if request_id is None else request_id
        params = params or SamplingParams()
        if name in self._live:
            raise RequestError("request_id", name, "is in use by another request that has not ended", name)
        try:
            text = prompt if isinstance(prompt, str) else None
            ids = self._encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            request = self.runner.add(NewRequest(name, ids, params))
        except RequestError as error:
            raise error.of(name) from None
        prompt_ids = tuple(request.prompt_token_ids.tolist())
        output = RequestOutput(name, text, prompt_ids, seed=request.sampling.seed)
        self._live[name] = _Live(output, self._detokenizer(params, prompt_ids))
        self.figures = evolve(self.figures, prompt_tokens=self.figures.prompt_tokens + len(prompt_ids))
        return name

    def step(self) -> tuple[RequestOutput, ...]:
        """One step; the requests that moved, in the order of the batch."""
        held, self._held = self._held, ()
        return held + self._step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and returns what it has so far; None if no request of that id is running."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self.runner.abort(request_id)
        rest = live.detokenizer.flush() if live.detokenizer else ""
        output = live.output
        return evolve(output, text=output.text + rest, delta=rest, finish_reason=FinishReason.ABORT)

    def update_weights(self, params: Tree) -> int:
        """Other parameters of the same model, as a `Checkpoint` holds them; returns their version, one above.

        Running requests go on with the keys and values that they have; nothing that was cached before is found again.
        """
        return self.runner.update_weights(placed(params, self.env.device.kernels))

    def has_unfinished(self) -> bool:
        return bool(self._held) or self.runner.has_unfinished()

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """All prompts at once: a `RequestOutput` each time one of them moves.

        One that is refused comes out at once, with `finish_reason` "error" and the message; the others go on. If the
        caller stops listening, what is left is aborted. Requests added otherwise go on too, and come out of `step`.
        """
        return (output for _, output in self._stream(prompts, params, add_special_tokens))

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """All prompts to their ends, in the order in which they were given. One that is refused carries its error."""
        newest = dict(self._stream(prompts, params, add_special_tokens))
        return [newest[index] for index in range(len(prompts))]

    def _stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        add_special_tokens: bool,
    ) -> Iterator[tuple[int, RequestOutput]]:
        index_of: dict[str, int] = {}
        try:
            for index, (prompt, each) in enumerate(zip(prompts, _one_each(params, len(prompts)), strict=True)):
                name = self._new_name()
                try:
                    index_of[self.add(prompt, each, name, add_special_tokens)] = index
                except RequestError as error:
                    yield index, _refused(name, prompt, error)
            while index_of:
                outputs = self._step()
                self._held += tuple(output for output in outputs if output.request_id not in index_of)
                for output in [each for each in outputs if each.request_id in index_of]:
                    yield (index_of.pop if output.finished else index_of.__getitem__)(output.request_id), output
        finally:
            for name in index_of:
                self.abort(name)

    def _step(self) -> tuple[RequestOutput, ...]:
        began = time.perf_counter()
        report = self.runner.step()
        in_use = sum(pool.num_blocks - 1 - pool.num_free for pool in self.sched.pools)
        outputs = tuple(self._moved(event) for event in report.events if event.request_id in self._live)
        figures = self.figures
        self.figures = evolve(
            figures,
            output_tokens=figures.output_tokens + sum(len(event.token_ids) for event in report.events),
            steps=figures.steps + 1,
            cached_tokens=figures.cached_tokens + sum(each.num_computed_tokens for each in report.schedule.new),
            preemptions=figures.preemptions + len(report.schedule.preempted),
            peak_blocks=max(figures.peak_blocks, in_use),
            seconds=figures.seconds + time.perf_counter() - began,
        )
        return outputs

    def _new_name(self) -> str:
        return next(name for name in map("request-{}".format, self._numbers) if name not in self._live)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("prompt", text, "the checkpoint has no tokenizer: give token ids")
        return self.tokenizer.encode(text, add_special_tokens)

    def _detokenizer(self, params: SamplingParams, prompt: tuple[int, ...]) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(self.tokenizer, params.stop, prompt_token_ids=prompt)

    def _moved(self, event: RowEvent) -> RequestOutput:
        """A request with the tokens of an event; one that met a stop string ends here."""
        live = self._live[event.request_id]
        delta, reason = "", event.finish_reason
        if live.detokenizer is not None:
            delta = live.detokenizer.add(event.token_ids)
            if live.detokenizer.stopped is not None and event.error is None:
                if reason is None:
                    self.runner.abort(event.request_id, FinishReason.STOP)
                reason = FinishReason.STOP
            elif reason is not None:
                delta += live.detokenizer.flush()
        live.output = evolve(
            live.output,
            token_ids=live.output.token_ids + event.token_ids,
            text=live.output.text + delta,
            delta=delta,
            finish_reason=reason,
            error=event.error,
            weights_versions=live.output.weights_versions + (event.weights_version,) * len(event.token_ids),
        )
        if reason is not None:
            del self._live[event.request_id]
        return live.output


def _configured(
    limits: SchedLimits, cache: CacheConfig, settings: Mapping[str, int | str | None]
) -> tuple[SchedLimits, CacheConfig]:
    """Both with the settings that are theirs; `TypeError` for one that is neither's."""
    of_limits = {each.name for each in fields(SchedLimits)}
    of_cache = {each.name for each in fields(CacheConfig)}
    unknown = settings.keys() - of_limits - of_cache
    if unknown:
        raise TypeError(f"unknown settings {sorted(unknown)}: there are {sorted(of_limits | of_cache)}")
    given = {name: value for name, value in settings.items() if value is not None}
    return (
        evolve(limits, **{name: value for name, value in given.items() if name in of_limits}),
        evolve(cache, **{name: value for name, value in given.items() if name in of_cache}),
    )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    return params


def _refused(name: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(name, text, (), finish_reason=FinishReason.ERROR, error=str(error))
