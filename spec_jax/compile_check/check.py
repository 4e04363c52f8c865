"""Compiles the engine's own programs for a GPU machine, from shapes alone, and reads what came out."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ..cache import bytes_per_token
from ..checkpoints.huggingface import read_config
from ..config import DraftConfig, EagleConfig, EngineConfig, ModelConfig
from ..errors import UserError
from ..programs import Program, Programs
from ..shapes import SHAPES
from ..sharding import ShardingRules
from ..sizes import Sizes
from . import thunks
from .copies import large_copies
from .kernels import parse_kernels
from .report import ProgramReport, Report, Roofline
from .targets import Target, find_target, mesh_of

_RESERVED = 0.08  # of a device's memory: CUDA's own, NCCL's buffers, instantiated graphs
_GUESSED_TEMPORARIES = 2e9
_CONTEXTS = (1024, 8192, 32_768)
_DTYPE = "bfloat16"
_DRAFTS = ("auto", "ngram", "eagle", "none")
_DRAFT_VOCABULARY = 32_000  # of published heads


def compile_check(
    model: str,
    target: str,
    devices: int = 1,
    *,
    kv_cache_dtype: str = "auto",
    draft: str = "ngram",
    num_draft_tokens: int = 5,
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    num_kv_tokens: int | None = None,
    num_layers: int | None = None,
) -> Report:
    """Compiles the decode burst and the largest prefill chunk of `model`, in bfloat16, for `devices` GPUs of kind `target`.

    Args:
      model: a name of `shapes.SHAPES`, or a Hugging Face folder or config.json.
      max_model_len: by default the model's own limit, at most 8192.
      num_kv_tokens: room of the cache; by default what `max_num_seqs` sequences need, or what fits, if that is less.
      num_layers: fewer layers than the model has, for a quick look at the same structure.

    Raises:
      UserError: a value cannot be used, or XLA's compiler for CUDA is not installed.

    One process compiles for one kind of GPU: Mosaic remembers the first.
    """
    machine = find_target(target)
    config = find_shape(model)
    max_model_len = config.model_len(max_model_len)
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_layers:
            raise UserError(f"num_layers is {num_layers}: allowed are 1 to {config.num_layers}")
        config = replace(config, num_layers=num_layers)
    jax.config.update("jax_platforms", "cpu")
    mesh, rules = mesh_of(machine, devices), ShardingRules()
    rules.check(mesh, config)
    engine_config = EngineConfig(max_model_len=max_model_len, max_num_seqs=max_num_seqs, kv_cache_dtype=kv_cache_dtype)
    drafter = _drafter(draft, num_draft_tokens, config)

    sizes = Sizes(config, drafter, engine_config, _DTYPE, mesh)
    token_bytes = bytes_per_token(config, sizes.cache_dtype) // devices
    if drafter.head is not None:
        token_bytes += bytes_per_token(drafter.head.layer, sizes.cache_dtype) // devices
    weight_bytes = _local_bytes(Programs(sizes, mesh, rules).weights)
    target_sizes = Sizes(config, DraftConfig(num_tokens=0), engine_config, _DTYPE, mesh)
    head_bytes = weight_bytes - _local_bytes(Programs(target_sizes, mesh, rules).weights)
    usable_bytes = (1 - _RESERVED) * machine.memory_bytes
    room = usable_bytes - weight_bytes
    if num_kv_tokens is None:
        wanted = max_num_seqs * max_model_len
        num_kv_tokens = max(int(min(wanted, (room - _GUESSED_TEMPORARIES) / token_bytes)), sizes.page_size)
    if num_kv_tokens * token_bytes > machine.memory_bytes:
        raise UserError(
            f"num_kv_tokens is {num_kv_tokens}: that is {num_kv_tokens * token_bytes / 1e9:.0f} GB per device, and a "
            f"{target} has {machine.memory_bytes / 1e9:.0f} GB"
        )
    sizes = Sizes(config, drafter, replace(engine_config, num_kv_tokens=num_kv_tokens), _DTYPE, mesh)
    programs = Programs(sizes, mesh, rules)

    chunk = engine_config.prefill_chunks[-1]
    shape = sizes.burst(max_num_seqs, max_num_seqs, max_model_len, False, False)
    reports = [
        _compile(f"decode burst, {shape.num_slots} slots", programs, lambda: programs.burst(shape)),
        _compile(f"prefill, {chunk} tokens", programs, lambda: programs.prefill(chunk, sizes.max_pages, False)),
    ]
    state_bytes = _local_bytes((programs.state, programs.token_bias))
    temporaries = max(report.temporary_bytes for report in reports)
    return Report(
        model=model,
        target=target,
        devices=devices,
        kv_cache_dtype=sizes.cache_dtype,
        num_draft_tokens=drafter.num_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        attention="Mosaic" if sizes.attention_is_mosaic else "XLA",
        memory_bytes=machine.memory_bytes,
        usable_bytes=usable_bytes,
        weight_bytes=weight_bytes,
        cache_bytes=_local_bytes(programs.cache),
        state_bytes=state_bytes,
        num_kv_tokens=num_kv_tokens,
        kv_tokens_that_fit=max(int((room - state_bytes - temporaries) / token_bytes), 0),
        programs=reports,
        rounds=[
            _roofline(config, sizes, machine, devices, weight_bytes - head_bytes, head_bytes, context)
            for context in sorted({min(c, max_model_len) for c in _CONTEXTS})
        ],
    )


def _drafter(draft: str, num_draft_tokens: int, target: ModelConfig) -> DraftConfig:
    """Where a head drafts, it is an EAGLE-3 head of the usual shape, as no weights are read."""
    if draft not in _DRAFTS:
        raise UserError(f"draft {draft!r} is unknown: allowed are {', '.join(_DRAFTS)}")
    head = (
        EagleConfig.for_target(target, min(target.vocab_size, _DRAFT_VOCABULARY))
        if draft in ("auto", "eagle")
        else None
    )
    return DraftConfig.create(num_draft_tokens, uses_ngrams=draft in ("auto", "ngram"), head=head)


def find_shape(model: str) -> ModelConfig:
    """By name, or from a Hugging Face folder or its config.json. Raises UserError."""
    if model in SHAPES:
        return SHAPES[model]
    try:
        path = Path(model).expanduser()
        folder = path.parent if path.name == "config.json" else path
        is_known = bool(model) and folder.is_dir()
    except (OSError, RuntimeError):  # no such user, a name that no file system takes
        is_known = False
    if not is_known:
        raise UserError(
            f"model {model!r} is neither a known shape ({', '.join(SHAPES)}) nor a folder with a config.json"
        )
    return read_config(folder)


def _compile(name: str, programs: Programs, lower: Any) -> ProgramReport:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with _mosaic_says(folder) as lowering:
            program: Program = lower()
        with _mosaic_says(folder) as assembler, _no_compilation_cache():
            compiled = program.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        tree = thunks.parse_thunks(_newest(folder, "*thunk_sequence_after_thunk_passes.txt"))
    hlo = compiled.as_text() or ""
    always, sometimes = thunks.round_thunks(tree)
    memory: Any = compiled.memory_analysis()
    arrays = jax.tree.leaves((programs.weights, programs.cache))
    shapes = [(x, shape) for x in arrays for shape in (x.shape, x.sharding.shard_shape(x.shape)) if len(shape) > 1]
    protected = {(_hlo_dtype(x), shape) for x, shape in shapes}
    return ProgramReport(
        name=name,
        compile_s=time.perf_counter() - started,
        command_buffers=len(thunks.command_buffers(tree)),
        loop_in_command_buffer=thunks.holds_loop(tree) if always else None,
        thunks_outside=dict(thunks.outside(tree)),
        host_transfers=thunks.host_transfers(tree),
        launches_per_round=thunks.num_launches(always),
        launches_when_needed=thunks.num_launches(sometimes),
        collectives_per_round=dict(thunks.collectives(always)),
        collectives_when_needed=dict(thunks.collectives(sometimes)),
        copies_of_weights_or_cache=large_copies(hlo, protected),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        kernels=parse_kernels(lowering(), assembler()),
    )


def _hlo_dtype(x: jax.ShapeDtypeStruct) -> str:
    return {"bfloat16": "bf16", "uint8": "u8", "float32": "f32"}[x.dtype.name]


def _local_bytes(arrays: Any) -> int:
    """Of the share of one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)


def _newest(folder: str, pattern: str) -> str:
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_mtime)
    if not files:
        raise RuntimeError(f"XLA wrote no {pattern}: this version names its dumps otherwise")
    return files[-1].read_text(encoding="utf-8", errors="replace")


def _roofline(
    config: ModelConfig,
    sizes: Sizes,
    machine: Target,
    devices: int,
    weight_bytes: int,
    head_bytes: int,
    context: int,
) -> Roofline:
    """Every weight but the embedding table is read once, every key and value of every sequence once; those of a draft head
    once per draft, but for what fuses features, once. N-grams read the texts once per token that they compare."""
    B, T = sizes.config.max_num_seqs, sizes.draft.num_tokens + 1
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 2 // devices
    read = weight_bytes - table
    kv = B * context * bytes_per_token(config, sizes.cache_dtype) / devices
    attention = 4 * B * T * context * config.num_layers * config.num_heads * config.head_dim / devices
    flops = 2 * B * T * read / 2 + attention  # two bytes a weight, one multiply-add each
    seconds = max((read + kv) / machine.bytes_per_second, flops / machine.flops_per_second)
    drafter = sizes.draft
    draft: float = B * sizes.config.max_model_len * 4 * drafter.ngram_max if drafter.num_tokens else 0
    if drafter.head is not None:
        rows = B * context * bytes_per_token(drafter.head.layer, sizes.cache_dtype) / devices
        fusion = drafter.head.feature_size * drafter.head.layer.hidden_size * 2  # whole on every device
        draft += fusion + drafter.num_tokens * (head_bytes - fusion + rows)
    return Roofline(context, read + kv, flops, seconds, draft, draft / machine.bytes_per_second)


@contextmanager
def _mosaic_says(folder: str) -> Iterator[Any]:
    """What Mosaic's compiler prints inside: it writes to the process's own standard output, past Python's."""
    path = Path(folder) / f"mosaic-{time.monotonic_ns()}.txt"
    names = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    sys.stdout.flush()
    kept = os.dup(1)
    text = ""
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
            yield lambda: text
            sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        text = path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """A program that is read back from a cache says nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
