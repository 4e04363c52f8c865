"""What the engine's Python costs: tokens per second of `LLM.generate` against the bare compiled loop, on one prompt.

    python benchmarks/engine_overhead.py

The bare loop is the same burst program, called again and again with nothing between the calls but reading whether the slot
has ended. Both run in turn, several times; the medians are compared.
"""

import statistics
import time

import jax
import numpy as np
import tyro

from spec_jax import LLM, SamplingParams
from spec_jax.llm import Prompt


def main(model: str = "smollm2-135m", max_tokens: int = 256, repeats: int = 7) -> None:
    prompt = [{"role": "user", "content": "Tell me a long story about a fox, a dog and a very old oak."}]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    llm = LLM(model, max_num_seqs=1)
    engine_speeds, bare_speeds = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        [output] = llm.generate(prompt, params)
        engine_speeds.append(len(output.token_ids) / (time.perf_counter() - start))
        bare_speeds.append(bare(llm, prompt, params))
    engine, loop = statistics.median(engine_speeds[1:]), statistics.median(bare_speeds[1:])
    print(f"LLM.generate {engine:.2f} tokens/s, bare loop {loop:.2f} tokens/s: {100 * engine / loop:.1f} %")


def bare(llm: LLM, prompt: Prompt, params: SamplingParams) -> float:
    """Tokens per second from prompt to end, with the engine's own programs and nothing of its scheduling."""
    engine = llm.engine
    [request] = llm._requests(prompt, params, False)
    start = time.perf_counter()
    engine.add(request)
    engine._prefill()
    length, rounds = len(request.prompt), np.int32(engine.config.rounds_per_burst)
    growth = int(rounds) * (engine.draft.num_tokens + 1)
    while True:
        program = engine.programs.burst(engine._burst_shape(1, min(length + growth, request.max_length), False, False))
        here = engine._on_device
        here.cache, here.state, out = program(engine._weights, here.cache, here.state, here.token_bias, rounds, None)
        length += int(out.num_tokens[0])
        if int(out.finish[0]):
            break
    seconds = time.perf_counter() - start
    jax.block_until_ready(here.cache)
    engine.abort(request)
    return params.max_tokens / seconds


if __name__ == "__main__":
    tyro.cli(main)
