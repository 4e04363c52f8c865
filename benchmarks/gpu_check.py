"""Everything that only a GPU can prove, in one script of under four minutes on an H200.

    python benchmarks/gpu_check.py --output gpu-check.json      # needs jax[cuda13] and flax; downloads nothing

Weights are random, in the shapes of Llama 3.1 8B. The table comes last; a check that the time did not allow says so. With
`--small` it runs in toy shapes on any machine, as a test of the script itself.
"""

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from spec_jax.cache import bytes_per_token, create_cache
from spec_jax.config import DraftConfig, EngineConfig, ModelConfig
from spec_jax.decode_loop import DecodeState
from spec_jax.kernels import Pages, paged_attention, write_kv
from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from spec_jax.programs import Programs
from spec_jax.shapes import SHAPES
from spec_jax.sizes import Sizes

LLAMA_8B = SHAPES["llama-3.1-8b"]
LITTLE = replace(LLAMA_8B, vocab_size=2048, hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2, ffn_size=1024)
BATCHES, CONTEXTS = (1, 8, 32), (1024, 8192, 32_256)  # the last leaves room for what the rounds add
CAPACITY = {"auto": 288_000, "fp8": 1_048_576}  # tokens of cache; bfloat16 holds 8 sequences of 32k, not 32
GOALS = {"round": 1.15, "attention": 0.8, "float8": 1.7, "bf16 error": 1e-2, "fp8 error": 4e-2}


def bandwidth(small: bool) -> float:
    """Bytes per second of a plain copy: what "100 %" means here."""
    x = jnp.zeros(2**24 if small else 2**31, jnp.uint8)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: y + jnp.uint8(1), x), donate_argnums=0)
    x = jax.block_until_ready(copy(x))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        x = jax.block_until_ready(copy(x))
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * x.nbytes / min(seconds)


# --- kernels -----------------------------------------------------------------------------------------------------------


KERNEL_CASES = {  # cache, B, T, K, G, head_dim, page, context
    "decode, bf16": ("auto", 4, 6, 8, 4, 128, 64, 512),
    "decode, fp8": ("fp8", 4, 6, 8, 4, 128, 64, 512),
    "context 131,072, bf16": ("auto", 1, 6, 1, 4, 128, 64, 131_072),
    "context 131,072, fp8": ("fp8", 1, 6, 1, 4, 128, 64, 131_072),
    "prefill of 64 rows, bf16": ("auto", 1, 64, 8, 4, 128, 64, 512),
    "prefill of 64 rows, fp8": ("fp8", 1, 64, 8, 4, 128, 64, 512),
    "head_dim 64, groups of 3, page 16, bf16": ("auto", 3, 6, 3, 3, 64, 16, 512),
    "head_dim 64, groups of 3, page 32, fp8": ("fp8", 3, 6, 3, 3, 64, 32, 512),
    "head_dim 80, bf16": ("auto", 2, 6, 4, 1, 80, 64, 512),
    "head_dim 96, page 128, fp8": ("fp8", 2, 6, 4, 3, 96, 128, 512),
    "head_dim 256, bf16": ("auto", 2, 6, 2, 8, 256, 64, 512),
    "head_dim 256, fp8": ("fp8", 2, 6, 2, 8, 256, 64, 512),
}


def filled_pages(cache: str, shape: tuple[int, ...], value: int) -> Pages:
    """Pages that hold one number everywhere, in float8 as its bits, with scales of 1."""
    if cache == "fp8":
        return Pages(jnp.full(shape, value, jnp.uint8), jnp.ones(shape[:-1], jnp.float32))
    return Pages(jnp.full(shape, value, jnp.bfloat16))


def kernel_error(small: bool, cache: str, B: int, T: int, K: int, G: int, hd: int, page: int, context: int) -> float:
    """Error of attention relative to float64 over the unquantized keys and values, as a share of the norm."""
    if small:
        K, context = min(K, 2), 256
    rng = np.random.default_rng(0)
    N = context // page
    tables = jnp.asarray(rng.permutation(np.arange(1, 1 + B * N)).reshape(B, N), jnp.int32)
    k, v = (jnp.asarray(rng.normal(size=(B, context, K, hd)).astype(ml_dtypes.bfloat16)) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(B, T, K * G, hd)).astype(ml_dtypes.bfloat16))
    shape = (1 + B * N, K, page, hd)
    pages = filled_pages(cache, shape, 77)
    everywhere = jnp.broadcast_to(jnp.arange(context, dtype=jnp.int32), (B, context))
    # The last sequence is full, the first as short as can be.
    last = np.linspace(T, context, B).astype(int) if B > 1 else np.array([context])
    positions = jnp.asarray(last[:, None] - T + np.arange(T), jnp.int32)
    pages = jax.jit(write_kv)(pages, pages, k, v, tables, everywhere, everywhere < jnp.asarray(last)[:, None])
    got = jax.jit(functools.partial(paged_attention, scale=hd**-0.5))(q, *pages, tables, positions)

    error = norm = 0.0
    for b in range(B):
        for h in range(K):
            keys, values = (np.asarray(x[b, : last[b], h], np.float64) for x in (k, v))
            rows = np.asarray(q[b, :, h * G : (h + 1) * G], np.float64)
            scores = np.einsum("tgd,sd->tgs", rows, keys) * hd**-0.5
            seen = np.arange(last[b]) <= np.asarray(positions[b])[:, None, None]
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want = np.einsum("tgs,sd->tgd", weights / weights.sum(-1, keepdims=True), values)
            error += np.sum((np.asarray(got[b, :, h * G : (h + 1) * G], np.float64) - want) ** 2)
            norm += np.sum(want**2)
    return math.sqrt(error / norm)


def attention_speed(cache: str, small: bool) -> float:
    """Bytes of keys and values per second, 8 sequences of 32,256 tokens, 6 rows each, Llama 3.1 8B's heads."""
    B, T, K, G, hd, page = 8, 6, 8, 4, 128, 64
    context, times = (256, 2) if small else (32_256, 20)
    N = context // page
    shape = (1 + B * N, K, page, hd)
    pages = filled_pages(cache, shape, 0)
    values = jax.tree.map(lambda x: x + 0, pages)  # memory of its own
    tables = jnp.arange(1, 1 + B * N, dtype=jnp.int32).reshape(B, N)
    positions = jnp.full((B, T), context - 1, jnp.int32)

    @jax.jit
    def run(q, k, v):
        step = functools.partial(paged_attention, scale=hd**-0.5)
        return jax.lax.fori_loop(0, times, lambda _, q: step(q, k, v, tables, positions) + q, q)

    q = jnp.ones((B, T, K * G, hd), jnp.bfloat16)
    jax.block_until_ready(run(q, pages, values))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(q, pages, values))
        seconds.append((time.perf_counter() - start) / times)
    return sum(x.nbytes for x in jax.tree.leaves((pages, values))) / min(seconds)


# --- the loop ----------------------------------------------------------------------------------------------------------


class Bench:
    """One model with one cache: bursts of any batch size, on random texts."""

    def __init__(self, config: ModelConfig, cache: str, K: int, slots: int, length: int, room: int):
        engine = EngineConfig(
            max_model_len=length, max_num_seqs=slots, num_kv_tokens=room, kv_cache_dtype=cache, page_size=64,
            rounds_per_burst=32,
        )  # fmt: skip
        self.config = config
        self.weights: list[jax.Array] = []
        self.sizes = Sizes(config, DraftConfig(num_tokens=K), engine, "bfloat16")
        self.programs = Programs(self.sizes)
        self.bias = jnp.zeros((slots, config.vocab_size), jnp.float32)
        self.cache: Any = None

    def program(self, slots: int) -> Any:
        return self.programs.burst(self.sizes.burst(slots, slots, self.sizes.config.max_model_len, False, False))

    def state(self, context: int, slots: int, temperature: float = 0.0) -> DecodeState:
        """Slots of random text of `context` tokens; the rest are empty. Pages are not shared."""
        empty = jax.tree.map(np.array, self.sizes.create_state())
        rng = np.random.default_rng(1)
        pages = min(self.sizes.max_pages, (self.sizes.num_pages - 1) // slots)
        state = empty._replace(sampling=empty.sampling._replace(seed=empty.sampling.seed + 5))
        state.tokens[:slots, :context] = rng.integers(0, self.config.vocab_size, (slots, context))
        for name, value in (("length", context), ("prompt_length", context), ("max_length", 10**6), ("active", True)):
            getattr(state, name)[:slots] = value
        state.sampling.temperature[:slots] = temperature
        state.max_length[:] = np.minimum(state.max_length, self.sizes.config.max_model_len)
        state.block_tables[:slots, :pages] = np.arange(1, 1 + slots * pages).reshape(slots, pages)
        return jax.device_put(state)

    def run(self, state: DecodeState, slots: int, rounds: int) -> tuple[DecodeState, Any]:
        """One burst."""
        if self.cache is None:
            self.cache = create_cache(self.programs.cache)
        cache, self.cache = self.cache, None  # if this fails, the next check makes a new one
        self.cache, state, output = self.program(slots)(
            self.weights, cache, state, self.bias, np.int32(rounds), None
        )  # fmt: skip
        return state, output

    def seconds_per_round(self, context: int, slots: int, few: int = 4, many: int = 20) -> float:
        """The slope between a short and a long burst: what starting and reading a burst costs is not in it."""
        self.run(self.state(context, slots), slots, 2)  # the first run of a program is not yet a graph
        self.run(self.state(context, slots), slots, 2)
        took = {few: [], many: []}
        for _ in range(3):
            for rounds in (few, many):
                state = self.state(context, slots)
                jax.block_until_ready((state, self.cache))
                start = time.perf_counter()
                _, output = self.run(state, slots, rounds)
                jax.block_until_ready(output)
                took[rounds].append(time.perf_counter() - start)
        return (min(took[many]) - min(took[few])) / (many - few)

    def seconds_per_host_round(self, context: int, slots: int, rounds: int = 16) -> float:
        """Bursts of one round, each read before the next is started: the way of a host that drives the loop."""
        state, _ = self.run(self.state(context, slots), slots, 1)
        start = time.perf_counter()
        for _ in range(rounds):
            state, output = self.run(state, slots, 1)
            np.asarray(output.num_tokens)
        return (time.perf_counter() - start) / rounds


def weights_of(config: ModelConfig) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(Decoder(random_weights(0, "bfloat16"), config)))


def loop_identity() -> dict[str, Any]:
    """One burst of 24 rounds, three times in a row, against 24 bursts of one round: the same tokens?"""
    bench = Bench(LITTLE, "auto", 5, 4, 1024, 8192)
    bench.weights = weights_of(LITTLE)

    def tokens(bursts: list[int]) -> list[list[int]]:
        state = bench.state(200, 4, temperature=0.8)
        for rounds in bursts:
            state, _ = bench.run(state, 4, rounds)
        lengths = np.asarray(state.length)
        return [np.asarray(state.tokens)[b, :n].tolist() for b, n in enumerate(lengths)]

    expected = tokens([1] * 24)
    same = [tokens([24]) == expected for _ in range(3)]
    return {"identical": all(same), "runs": same, "tokens": sum(map(len, expected))}


def weight_bytes(weights: list[jax.Array], config: ModelConfig) -> int:
    """Read in every round: all but the embedding table."""
    return sum(x.nbytes for x in weights) - config.vocab_size * config.hidden_size * 2


# --- the whole ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--seconds", type=float, default=220, help="no new check starts after so long")
    parser.add_argument("--small", action="store_true", help="toy shapes, for a machine without a GPU")
    args = parser.parse_args()
    started = time.perf_counter()
    device = jax.devices()[0]
    result: dict[str, Any] = {
        "device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "skipped": [],
    }  # fmt: skip

    def is_late() -> bool:
        return time.perf_counter() - started > args.seconds

    def check(name: str, run: Callable[[], Any]) -> Any:
        if is_late():
            result["skipped"].append(name)
            return None
        begin = time.perf_counter()
        try:
            value = run()
        except Exception as error:  # one broken check must not hide the others
            value = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(
            f"[{time.perf_counter() - started:6.1f} s] {name}: {value} ({time.perf_counter() - begin:.1f} s)",
            flush=True,
        )
        result[name] = value
        args.output.write_text(json.dumps(result, indent=1))
        return value

    check("copy_bytes_per_second", lambda: bandwidth(args.small))
    check("loop", loop_identity)
    errors: dict[str, Any] = {}
    result["kernel_errors"] = errors
    for name, case in KERNEL_CASES.items():
        if "131" not in name or not args.small:
            error = check(f"error, {name}", lambda case=case: kernel_error(args.small, *case))
            if error is not None:
                errors[name] = error
    for cache in ("auto", "fp8"):
        check(f"attention_bytes_per_second, {cache}", lambda cache=cache: attention_speed(cache, args.small))

    config = LITTLE if args.small else LLAMA_8B
    contexts = (64, 128) if args.small else CONTEXTS
    batches = (1, 2) if args.small else BATCHES
    capacity = {"auto": 1024, "fp8": 1024} if args.small else CAPACITY
    length = contexts[-1] + 512
    benches = {
        (cache, K): Bench(config, cache, K, batches[-1], length, capacity[cache])
        for cache, K in (("auto", 5), ("auto", 0), ("fp8", 5))
    }
    wanted = [("auto", 5, B) for B in batches] + [("auto", 0, 1)] + [("fp8", 5, B) for B in batches]
    result["mosaic"] = benches["auto", 5].sizes.attention_is_mosaic
    if is_late():
        result["skipped"].append("all rounds")
        wanted = []
    weights = weights_of(config) if wanted else []
    for bench in benches.values():
        bench.weights = weights
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiling = {
            (cache, K, B): pool.submit(lambda bench=benches[cache, K], B=B: bench.program(B).compile())
            for cache, K, B in wanted
        }
        for future in compiling.values():
            future.exception()  # nothing is timed while something compiles; what failed is said below
        rounds: list[dict[str, Any]] = []
        result["rounds"] = rounds
        one_layer = Bench(replace(LITTLE, num_layers=1), "auto", 5, 1, 1024, 2048)
        one_layer.weights = weights_of(one_layer.config) if wanted else []
        check("one_layer_round_us", lambda: 1e6 * one_layer.seconds_per_round(200, 1))
        check("one_layer_host_round_us", lambda: 1e6 * one_layer.seconds_per_host_round(200, 1))
        holding = ("", 0)
        for cache, K, B in wanted:
            bench = benches[cache, K]
            if (cache, K) != holding:  # one cache at a time
                for other in benches.values():
                    other.cache = None
                holding = (cache, K)
            for context in contexts:
                if B * (context + 256) > capacity[cache]:
                    result["skipped"].append(
                        f"round, {cache}, K = {K}, B = {B}, context {context}: the cache does not fit"
                    )
                    continue

                def one(bench=bench, key=(cache, K, B), B=B, context=context) -> dict[str, Any]:
                    compiling[key].result()
                    read = weight_bytes(weights, config)
                    read += B * context * bytes_per_token(config, bench.sizes.cache_dtype)
                    seconds = bench.seconds_per_round(context, B)
                    least = read / result["copy_bytes_per_second"]
                    return {"ms": 1e3 * seconds, "roofline_ms": 1e3 * least, "ratio": seconds / least}

                name = f"round, {cache}, K = {K}, B = {B}, context {context}"
                found = check(name, one)
                if found is not None:
                    rounds.append({"cache": cache, "K": K, "B": B, "context": context, **found})
            if (cache, K, B) == ("auto", 5, 1):
                check("host_round_ms", lambda bench=bench: 1e3 * bench.seconds_per_host_round(contexts[0], 1))
    result["seconds"] = time.perf_counter() - started
    args.output.write_text(json.dumps(result, indent=1))
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """A page of text; every figure that has a goal says whether it is reached."""

    def judged(reached: bool) -> str:
        return "ok" if reached else "NOT REACHED"

    copy = result.get("copy_bytes_per_second")
    lines = [f"\n{result['device']}, jax {result['jax']}, Mosaic attention: {'yes' if result['mosaic'] else 'no'}"]
    lines.append(f"copy: {copy / 1e12:.2f} TB/s" if isinstance(copy, float) else f"copy: {copy}")
    lines.append(f"loop, three times in a row, against the host-driven one: {result.get('loop')}")
    for name, error in result["kernel_errors"].items():
        goal = GOALS["fp8 error" if "fp8" in name else "bf16 error"]
        lines.append(
            f"  error, {name}: {error:.1e} {judged(error < goal)}"
            if isinstance(error, float)
            else f"  error, {name}: {error}"
        )
    speeds = {cache: result.get(f"attention_bytes_per_second, {cache}") for cache in ("auto", "fp8")}
    for cache, speed in speeds.items():
        if isinstance(speed, float) and isinstance(copy, float):
            share = speed / copy
            lines.append(
                f"attention at 32k, {cache}: {speed / 1e12:.2f} TB/s, {100 * share:.0f} % of a copy "
                f"{judged(share >= GOALS['attention'])}"
            )
    if all(isinstance(speed, float) for speed in speeds.values()):
        # Tokens per second: a token has 2 x 128 bytes in bfloat16, 128 and 4 for the scale in float8.
        gain = (speeds["fp8"] / 132) / (speeds["auto"] / 256)
        lines.append(f"  float8 against bfloat16: {gain:.2f} x {judged(gain >= GOALS['float8'])}")
    inside, outside = result.get("one_layer_round_us"), result.get("one_layer_host_round_us")
    if isinstance(inside, float) and isinstance(outside, float):
        lines.append(f"a round of a one-layer model: {inside:.0f} us in the loop, {outside:.0f} us driven by the host")
    measured = {(r["cache"], r["K"], r["B"], r["context"]): r for r in result.get("rounds", [])}
    for (cache, K, B, context), r in measured.items():
        figures = (
            f"{r['ms']:7.2f} ms, roofline {r['roofline_ms']:6.2f} ms, {r['ratio']:.2f} x" if "ms" in r else r["error"]
        )
        goal = f" {judged(r['ratio'] <= GOALS['round'])}" if "ms" in r and B == 1 else ""
        plain = measured.get((cache, 0, B, context), {})
        against = f", {r['ms'] / plain['ms']:.2f} x K = 0" if K and "ms" in r and "ms" in plain else ""
        lines.append(f"  {cache:>4} K = {K} B = {B:>2} context {context:>6}: {figures}{goal}{against}")
    if isinstance(result.get("host_round_ms"), float):
        lines.append(f"  the first of these driven by the host, round by round: {result['host_round_ms']:.2f} ms")
    lines += [f"skipped: {name}" for name in result["skipped"]]
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


if __name__ == "__main__":
    main()
