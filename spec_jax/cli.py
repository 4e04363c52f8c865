"""The command line: `spec-jax generate | bench | verify | train-draft | compile-check | fetch`.

A user's mistake ends in one line on standard error and exit code 2, never in a traceback.
"""

import gc
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro
from tyro.conf import Positional

from . import __version__
from .errors import UserError
from .params import SamplingParams

if TYPE_CHECKING:
    from .request import RequestOutput


@dataclass(frozen=True)
class ModelOptions:
    """What to run, and how."""

    model: str
    """Built-in name (smollm2-135m), Hugging Face folder, .gguf file, or hub id."""
    draft: str = "auto"
    """Who proposes tokens: auto (n-grams, and the draft head that comes with the model), ngram, eagle (that head alone),
    none for plain decoding, a folder or hub id with an EAGLE head (with n-grams), or eagle:FOLDER (that head alone). The
    text is the same."""
    num_draft_tokens: int = 5
    """Proposals per round, 0 to 16."""
    min_draft_confidence: float | None = None
    """A head stops drafting where by its own word all drafts so far are right with a probability below this; 0 always takes
    all. By default 0.25 on a CPU, 0 elsewhere."""
    dtype: str = "bfloat16"
    """Of weights and activations: bfloat16 or float32."""
    kv_cache_dtype: str = "auto"
    """Of the cache: auto, as dtype, or fp8 for half the memory of bfloat16."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens. By default the model's limit, at most 8192."""
    tensor_parallel_size: int = 1
    """How many devices of this machine the model is sharded over."""


def _sampling_options(**defaults: Any) -> Any:
    """The fields of `SamplingParams` with its own defaults and help, as options. They are checked by it, not here: what is
    wrong with them is then said in one line."""
    types = get_type_hints(SamplingParams) | {"json_schema": str | None}
    kept = [f for f in fields(SamplingParams) if f.name not in ("n", "prompt_logprobs")]
    options = [(f.name, types[f.name], field(default=defaults.get(f.name, f.default))) for f in kept]
    made = make_dataclass("SamplingOptions", options, frozen=True)
    made.__doc__ = SamplingParams.__doc__
    return made


@dataclass(frozen=True)
class Generate:
    """Answer one prompt, shown as it is written."""

    options: tyro.conf.OmitArgPrefixes[ModelOptions]
    sampling: tyro.conf.OmitArgPrefixes[_sampling_options()]  # type: ignore[valid-type]
    prompt: str
    """The prompt; "-" reads it from standard input."""
    chat: bool = False
    """Put the prompt into the model's chat template as a user message."""
    system: str | None = None
    """A system message before it; means --chat."""
    parse_special: bool = False
    """Read control tokens such as <|im_end|> inside the prompt as such, not as text."""
    json: bool = False
    """Print one JSON object at the end instead of the text."""


@dataclass(frozen=True)
class Bench:
    """Measure acceptance length, time per token and time to first token over a file of questions."""

    options: tyro.conf.OmitArgPrefixes[ModelOptions]
    sampling: tyro.conf.OmitArgPrefixes[_sampling_options(max_tokens=128, seed=0)]  # type: ignore[valid-type]
    dataset: Path
    """JSONL with question_id, category and turns, as in Spec-Bench; the first turn is asked."""
    compare: tuple[str, ...] = ()
    """Other drafters, measured side by side, question by question; what is "faster" is the first one against the last."""
    per_category: int | None = None
    """Ask only the first so many questions of each category."""
    output: Path = Path("bench-results")
    """Folder for result.json and plot.png."""


@dataclass(frozen=True)
class Verify:
    """Prove on your own model that drafts change nothing: same tokens as without them, and the target's own distribution.

    Exit code 1 where they do."""

    model: str
    """Built-in name (smollm2-135m), Hugging Face folder, .gguf file, or hub id."""
    draft: str = "auto"
    """Who proposes tokens: auto, ngram, eagle, a folder with a head, or eagle:FOLDER."""
    num_draft_tokens: int = 5
    """Proposals per round, 1 to 16."""
    dtype: str = "float32"
    """float32 must be identical; in bfloat16, which rounds differently with the size of a pass, near-ties may differ."""
    samples: int = 400
    """Seeded runs per distribution; more find smaller deviations."""


@dataclass(frozen=True)
class TrainDraft:
    """Train an EAGLE-3 draft head on what a model itself says.

    Run again after an interruption, it goes on where it stopped."""

    model: str
    """Built-in name (smollm2-135m), Hugging Face folder, .gguf file, or hub id."""
    output: Path
    """Folder for the head: model.safetensors and config.json, as vLLM and SGLang load them. work/ in it keeps what was
    made on the way."""
    prompts: Path | None = None
    """User turns to answer: JSONL with prompt or turns, or a text file with one per line. Without it, an instruct model
    writes them itself."""
    initial_head: Path | None = None
    """Folder of a head that train-draft made, to go on from; it is unrolled num_unrolled times from the first step, and the
    learning rate falls from then on. Without it, the head starts from the model's last layer."""
    num_conversations: int = 20_000
    """How many user turns are asked."""
    num_steps: int = 20_000
    """Training steps, of batch_rows x row_tokens tokens each."""
    draft_vocab_size: int | None = None
    """The most frequent tokens, which the head can propose: 8192, or those of initial_head; more are added to these."""
    max_user_tokens: int = 96
    """Longest user turn that the model writes."""
    max_answer_tokens: int = 192
    """Longest answer."""
    max_num_seqs: int = 64
    """Conversations that are generated at the same time."""
    batch_rows: int = 1
    """Rows of texts in a batch."""
    row_tokens: int = 1024
    """Tokens of a row; longer texts are cut."""
    num_unrolled: int = 3
    """Steps that the head is unrolled over its own output in training."""
    learning_rate: float = 1e-3
    """At its highest; Adam. It falls to zero over the last fifth of the steps."""
    dtype: str = "bfloat16"
    """Of the model; the head is trained in float32."""
    tensor_parallel_size: int = 1
    """How many devices of this machine the model and the head are sharded over."""
    seed: int = 0
    """Of conversations, order and untrained weights."""


@dataclass(frozen=True)
class CompileCheck:
    """Compile the decode loop and the prefill for a GPU machine, where there is no GPU, and say what XLA made of them.

    Exit code 1 where it is not one CUDA graph, copies weights or cache, spills registers, or does not fit."""

    model: str
    """A known shape (llama-3.1-8b, llama-3.1-70b, qwen3-8b, smollm2-135m), a Hugging Face folder, or a config.json."""
    target: str
    """The GPU: h200 or b200."""
    devices: int = 1
    """How many of them, 1 to 8; the model is sharded over all."""
    kv_cache_dtype: str = "auto"
    """auto (bfloat16) or fp8."""
    draft: str = "ngram"
    """Who proposes tokens: ngram, eagle (an EAGLE-3 head of the usual shape), auto (both) or none."""
    num_draft_tokens: int = 5
    """Proposals per round, 0 to 16."""
    max_num_seqs: int = 8
    """Sequences that run at the same time."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens. By default the model's limit, at most 8192."""
    num_kv_tokens: int | None = None
    """Room of the cache. By default enough for all sequences at full length, or what fits, if that is less."""
    num_layers: int | None = None
    """Compile only so many layers, for a quick look at the same structure."""
    json: bool = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class Fetch:
    """Download a model into the cache folder and print its path."""

    model: Positional[str]
    """Built-in name (smollm2-135m) or hub id."""


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[TrainDraft, tyro.conf.subcommand("train-draft")]
    | Annotated[CompileCheck, tyro.conf.subcommand("compile-check")]
    | Annotated[Fetch, tyro.conf.subcommand("fetch")]
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `spec-jax`."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"spec-jax {__version__}")
        return
    _show_log()
    gc.disable()  # importing and tracing make millions of objects that stay: collecting takes a second of the start
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notes about its own cache are not for users
    try:
        command = tyro.cli(
            Command, prog="spec-jax", description="Lossless speculative decoding on JAX.", args=arguments
        )
        match command:
            case Generate():
                _generate(command)
            case Bench():
                _bench(command)
            case Verify():
                _verify(command)
            case TrainDraft():
                _train_draft(command)
            case CompileCheck():
                _compile_check(command)
            case Fetch():
                _fetch(command)
    except UserError as error:
        sys.exit(_fail(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _show_log() -> None:
    """What this package has to say, such as what was understood of a draft head, on standard error."""
    log, handler = logging.getLogger("spec_jax"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("spec-jax: %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _fail(message: str) -> int:
    print(f"spec-jax: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _generate(command: Generate) -> None:
    params = _params(command.sampling)
    text = _read_prompt() if command.prompt == "-" else command.prompt
    prompt: str | list[dict[str, str]] = text
    if command.chat or command.system is not None:
        system = [] if command.system is None else [{"role": "system", "content": command.system}]
        prompt = [*system, {"role": "user", "content": text}]

    from .llm import LLM

    warm_up = None if command.parse_special else prompt
    llm = LLM(**vars(command.options), max_num_seqs=1, warm_up=warm_up, warm_up_params=params)
    gc.freeze()
    gc.enable()
    shown = 0
    for output in llm.stream(prompt, params, parse_special=command.parse_special):
        if not command.json:
            sys.stdout.buffer.write(output.text[shown:].encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
        shown = len(output.text)
    print(json.dumps(_as_json(output)) if command.json else "", flush=True)
    if output.finish_reason == "error":
        raise UserError(f"the text ended before its grammar did: {output.stop_reason}")
    if not command.json:
        print(_figures(output), file=sys.stderr)


def _figures(output: "RequestOutput") -> str:
    return (
        f"{len(output.token_ids)} tokens in {output.stats.rounds} passes of the target: "
        f"{output.stats.acceptance_length:.2f} per pass, {1000 * output.stats.tpot_s:.1f} ms per token, "
        f"first after {output.stats.ttft_s:.2f} s ({output.finish_reason})"
    )


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "stats": asdict(output.stats),
    }
    if output.logprobs is not None:
        found["logprobs"] = [{id_: entry._asdict() for id_, entry in token.items()} for token in output.logprobs]
    return found


def _params(options: Any) -> SamplingParams:
    """`--json-schema` is JSON text, or a file that holds it."""
    values = dict(vars(options))
    schema = values["json_schema"]
    if schema is not None and not schema.lstrip().startswith("{"):
        try:
            values["json_schema"] = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"json_schema is {schema!r}: neither JSON nor a file that can be read ({error})") from None
    return SamplingParams(**values)


def _read_prompt() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise UserError("standard input holds bytes that are no UTF-8: give the prompt as UTF-8") from None


def _bench(command: Bench) -> None:
    from .bench import run_bench

    gc.enable()
    run_bench(
        dataset=command.dataset,
        drafts=[command.options.draft, *command.compare],
        model_options={k: v for k, v in vars(command.options).items() if k != "draft"},
        params=_params(command.sampling),
        per_category=command.per_category,
        output=command.output,
    )


def _verify(command: Verify) -> None:
    from .verify import verify

    gc.enable()
    if not verify(**vars(command)):
        sys.exit(1)


def _train_draft(command: TrainDraft) -> None:
    from .training import train_draft

    gc.enable()
    train_draft(**vars(command))


def _compile_check(command: CompileCheck) -> None:
    from .compile_check import compile_check

    gc.enable()
    options = {name: value for name, value in vars(command).items() if name != "json"}
    report = compile_check(**options)
    print(json.dumps(report.as_json()) if command.json else "\n".join(report.lines()))
    if report.faults:
        sys.exit(1)


def _fetch(command: Fetch) -> None:
    from .checkpoints import fetch

    print(fetch(command.model))
