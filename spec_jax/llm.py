"""`LLM`: the offline API. Text, token ids or chat messages in; text out, whole or as it grows."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

from jax.sharding import Mesh

from .checkpoints import Drafter, HeadFiles, open_drafter, open_model
from .compilation import quiet_absent_gpu, use_compilation_cache, use_native_kernels
from .config import DraftConfig, EngineConfig, default_min_confidence, default_schedule
from .engine import Engine
from .errors import UserError
from .grammar import Grammar, GrammarCompiler
from .params import SamplingParams
from .request import Request, RequestOutput
from .sharding import ShardingRules, target_device, tensor_parallel_mesh
from .tokenizer import ChatMessage

Prompt = str | Sequence[int] | Sequence[ChatMessage]

DTYPES = ("bfloat16", "float32")


class LLM:
    """A model that generates text, several tokens per pass, with exactly the text that plain decoding gives.

    Not thread-safe. Streams and calls of `generate` may be interleaved on one thread: they share the device.

    Args:
      model: built-in name, Hugging Face folder, `.gguf` file, or hub id.
      draft: who proposes tokens: "auto" (n-grams, and the draft head that comes with the model), "ngram", "eagle" (the head
        alone), "none", the folder or hub id of an EAGLE head (with n-grams), or "eagle:" and a folder (that head alone).
      num_draft_tokens: proposals per round, 0 to 16.
      draft_schedule: fewer of them where more sequences run at once, as pairs (most sequences, proposals per round); beyond
        the last pair there are none. `[]` always takes `num_draft_tokens`; the default is `config.default_schedule`.
      min_draft_confidence: a head stops drafting where by its own word all drafts so far are right with a probability
        below this; 0 always takes all. The default is `config.default_min_confidence`.
      dtype: of weights and activations: "bfloat16" or "float32".
      kv_cache_dtype: "auto", as `dtype`, or "fp8": float8 e4m3 with one scale per token and head, or with the calibrated
        scales of the checkpoint where it has them. Half the memory of bfloat16; what it costs is in the README.
      max_model_len: longest prompt and answer together, in tokens; by default the model's own limit, at most 8192.
      max_num_seqs: sequences that run at the same time.
      num_kv_tokens: room of the cache in tokens over all sequences; by default enough for the longest one, and for
        `max_num_seqs` of them up to 16,384 tokens.
      rounds_per_burst: rounds that the device runs before the host looks again, where nobody streams.
      warm_up, warm_up_params: a prompt like the first one to come, and its parameters: what they need is compiled while the
        weights are read.
      tensor_parallel_size: how many of this machine's devices the model is sharded over.
      mesh, rules: or exactly which; `ShardingRules()` puts heads, feed-forward and vocabulary on axis "tp".
      prefill_mesh: other devices for prompts, with a second copy of the weights; decoding then does not wait for prompts.

    Raises:
      UserError: a value cannot be used; the message says what can.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str = "auto",
        num_draft_tokens: int = 5,
        draft_schedule: Sequence[tuple[int, int]] | None = None,
        min_draft_confidence: float | None = None,
        dtype: str = "bfloat16",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        num_kv_tokens: int | None = None,
        rounds_per_burst: int = 8,
        warm_up: Prompt | None = None,
        warm_up_params: SamplingParams | None = None,
        tensor_parallel_size: int = 1,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
        prefill_mesh: Mesh | None = None,
    ):
        # Refused before anything is fetched.
        DraftConfig(num_tokens=num_draft_tokens, min_confidence=min_draft_confidence or 0.0)
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is unknown: allowed are {', '.join(DTYPES)}")
        quiet_absent_gpu()
        use_compilation_cache()
        use_native_kernels()
        if mesh is not None and tensor_parallel_size != 1:
            raise UserError(f"tensor_parallel_size is {tensor_parallel_size}, and there is a mesh: give one of them")
        if tensor_parallel_size != 1 or type(tensor_parallel_size) is not int:
            mesh = tensor_parallel_mesh(tensor_parallel_size)
        files = open_model(model)
        mesh = (rules or ShardingRules()).usable(mesh, files.config)
        self.mesh = mesh
        self.config = files.config
        self.tokenizer = files.tokenizer
        engine_config = EngineConfig(
            max_model_len=files.config.model_len(max_model_len),
            max_num_seqs=max_num_seqs,
            num_kv_tokens=num_kv_tokens,
            rounds_per_burst=rounds_per_burst,
            kv_cache_dtype=kv_cache_dtype,
        )
        if kv_cache_dtype != "fp8":
            files = files.without_kv_scales()
        self._grammars: GrammarCompiler | None = None
        self._create_engine = partial(
            Engine, files.config, config=engine_config, dtype=dtype, mesh=mesh, rules=rules, prefill_mesh=prefill_mesh
        )
        self._open_drafter = partial(open_drafter, model=model, target=files)
        self._load_head = partial(HeadFiles.load, dtype=dtype, mesh=mesh, rules=rules)
        drafter = self._open_drafter(draft)
        self._draft_schedule, self._min_draft_confidence = draft_schedule, min_draft_confidence
        self.engine = self._create_engine(draft=self._draft_config(drafter, num_draft_tokens))
        with ThreadPoolExecutor(1) as compiler:
            compiling = []
            length = 0 if warm_up is None else len(self._encode(warm_up, parse_special=False))
            if 0 < length < engine_config.max_model_len:
                programs = self.engine.prepare(length, warm_up_params or SamplingParams(), streams=True)
                compiling = [compiler.submit(program.compile) for program in programs]
            try:
                self.decoder = files.load(dtype=dtype, mesh=mesh, rules=rules)
                self._load_into(self.engine, drafter)
                for future in compiling:
                    future.result()
            finally:
                compiler.shutdown(cancel_futures=True)

    def with_draft(self, draft: str, num_draft_tokens: int = 5) -> "LLM":
        """The same model on the same weights with another drafter: an engine and a cache of its own."""
        other, drafter = copy(self), self._open_drafter(draft)
        other.engine = self._create_engine(draft=self._draft_config(drafter, num_draft_tokens))
        other._load_into(other.engine, drafter)
        return other

    def _draft_config(self, drafter: Drafter, num_draft_tokens: int) -> DraftConfig:
        schedule, min_confidence = self._draft_schedule, self._min_draft_confidence
        platform = target_device(self.mesh).platform
        if schedule is None:
            schedule = default_schedule(platform, num_draft_tokens)
        if min_confidence is None:
            min_confidence = default_min_confidence(platform)
        head = None if drafter.head is None else drafter.head.config
        try:
            pairs = tuple((int(size), int(k)) for size, k in schedule)
        except (TypeError, ValueError):
            raise UserError(
                f"draft_schedule is {schedule!r}: give pairs (most sequences, proposals per round)"
            ) from None
        return DraftConfig.create(
            num_draft_tokens, uses_ngrams=drafter.uses_ngrams, head=head, min_confidence=min_confidence, schedule=pairs
        )

    def _load_into(self, engine: Engine, drafter: Drafter) -> None:
        if engine.draft.head is None or drafter.head is None:
            engine.load(self.decoder)
        else:
            engine.load(self.decoder, self._load_head(drafter.head))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many, and returns one output each, in order.

        A prompt is a string, a list of token ids, or a list of chat messages. `params` is one for all or one each.
        Control tokens inside strings are ordinary text unless `parse_special`.
        """
        many = _as_list(prompts)
        each = [params or SamplingParams()] * len(many) if isinstance(params, SamplingParams | None) else list(params)
        if len(each) != len(many):
            raise UserError(f"{len(many)} prompts came with {len(each)} SamplingParams: give one for all or one each")
        groups = [self._requests(prompt, p, parse_special) for prompt, p in zip(many, each, strict=True)]
        requests = [request for group in groups for request in group]
        added: list[Request] = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request)
            while not all(request.is_finished for request in requests):
                self.engine.step()
        finally:
            self._abort(added)
        return [_output(group) for group in groups]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = False
    ) -> Iterator[RequestOutput]:
        """Yields the output as it grows, the finished one last. Closing the iterator ends the request.

        What cannot be used is refused at once; the request itself begins when the first output is asked for.
        """
        group = self._requests(prompt, params or SamplingParams(), parse_special)
        for request in group:
            request.streams = True
            self.engine.check(request)
        return self._run(group)

    def _run(self, group: Sequence[Request]) -> Iterator[RequestOutput]:
        for request in group:
            self.engine.add(request)
        try:
            shown = 0
            while not all(request.is_finished for request in group):
                self.engine.step()
                num_committed = sum(request.num_committed for request in group)
                if num_committed > shown and not all(request.is_finished for request in group):
                    shown = num_committed
                    yield _output(group)
            yield _output(group)
        finally:
            self._abort(group)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _requests(self, prompt: Prompt, params: SamplingParams, parse_special: bool) -> list[Request]:
        """One request per completion."""
        ids = self._encode(prompt, parse_special)
        limit = self.engine.config.max_model_len
        if not ids:
            raise UserError("the prompt is empty: at least one token is needed")
        if len(ids) >= limit:
            raise UserError(
                f"the prompt has {len(ids)} tokens, max_model_len is {limit} and must hold at least one more: "
                f"shorten the prompt or raise max_model_len (this model: up to {self.config.max_position})"
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        bad_words = self._bad_words(params)
        return [
            Request(
                prompt=ids,
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                tokenizer=self.tokenizer,
                eos_token_ids=self.config.eos_token_ids,
                max_length=min(len(ids) + params.max_tokens, limit),
                seed=(seed + index) % 2**64,
                index=index,
                bad_words=bad_words,
                grammar=self._grammar(params),
            )
            for index in range(params.n)
        ]

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """As token ids; a word is looked for at the start of a text and behind a space, as in vLLM."""
        found: list[Sequence[int]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                text = word.lstrip()
                bare, spaced = (self.tokenizer.encode(t, add_special_tokens=False) for t in (text, f" {text}"))
                found += [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
            else:
                found.append(word)
        return list(dict.fromkeys(tuple(ids) for ids in found if ids))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if not params.is_constrained:
            return None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size, self.config.eos_token_ids)
        return self._grammars.compile(params)

    def _encode(self, prompt: Prompt, parse_special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=parse_special)
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, dict) for item in items):
            return self.tokenizer.encode_chat(items, parse_special=parse_special)
        if all(_is_id(item) for item in items):
            return [int(item) for item in items]
        raise UserError(f"a prompt is {_PROMPT_KINDS}; this one holds {_kinds(items)}")


def _output(group: Sequence[Request]) -> RequestOutput:
    first = group[0]
    return RequestOutput(
        prompt_token_ids=tuple(first.prompt),
        prompt_logprobs=None if first.params.prompt_logprobs is None else tuple(first.prompt_logprobs),
        outputs=tuple(request.snapshot() for request in group),
    )


_PROMPT_KINDS = "a string, a list of token ids, or a list of chat messages (dicts)"


def _is_id(item: Any) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _kinds(items: list[Any]) -> str:
    return ", ".join(sorted({type(item).__name__ for item in items}))


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, dict | bytes) or not isinstance(prompts, Iterable):
        raise UserError(f"a prompt is {_PROMPT_KINDS}, not {type(prompts).__name__}")
    items = list(prompts)
    is_one = bool(items) and (all(map(_is_id, items)) or all(isinstance(item, dict) for item in items))
    return [items] if is_one else items
