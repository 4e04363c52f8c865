"""How often a draft is kept at temperature 1: drawn with the target's own noise, or greedy, or by ideal rejection sampling.

    python benchmarks/acceptance.py --dataset spec_bench_dev.jsonl

Over the places of sampled answers, for the first draft of a round. p is the target's distribution. q is what n-grams
know: either the one token that stood behind the latest longest match (what the engine drafts), or how often each token
stood behind that match. A draft is kept when it is the target's own sample:

- coupled: the draft is argmax(log q + noise) with the noise that the target's sample is drawn with;
- greedy: the draft is argmax(q);
- ideal: 1 - TV(p, q), which no scheme can exceed (arXiv 2211.17192).

For a q of one token all three are p of that token. What coupled and greedy drafts reach is counted over `num_seeds` draws.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from spec_jax import LLM, SamplingParams
from spec_jax.bench import read_questions
from spec_jax.cache import abstract_cache, create_cache
from spec_jax.models.decoder import Decoder, Rows
from spec_jax.sampling import gumbel


@dataclass(frozen=True)
class Arguments:
    dataset: Path
    model: str = "smollm2-135m"
    per_category: int = 1
    max_tokens: int = 64
    num_seeds: int = 32


def main(args: Arguments) -> None:
    questions = read_questions(args.dataset, args.per_category)
    llm = LLM(args.model, draft="none", dtype="float32", max_model_len=4096, num_kv_tokens=8192)
    each = [SamplingParams(max_tokens=args.max_tokens, temperature=1.0, seed=i) for i, _ in enumerate(questions)]
    outputs = llm.generate([question.prompt for question in questions], each)

    kept: dict[str, list[np.ndarray]] = {"one token": [], "all followers": []}
    num_places = 0
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.token_ids)
        text = prompt + answer
        log_p = jax.nn.log_softmax(text_logits(llm.decoder, text[:-1], len(prompt) - 1))
        for i in range(len(answer)):
            followers = after_longest_match(text[: len(prompt) + i])
            num_places += 1
            if followers:
                latest = {followers[-1]: 1}
                for name, counts in (("one token", latest), ("all followers", Counter(followers))):
                    kept[name].append(rates(log_p[i], counts, len(prompt) + i, args.num_seeds))

    print(f"{num_places} places, {len(kept['one token'])} of them with a match; kept there (coupled, greedy, ideal):")
    for name, rows in kept.items():
        coupled, greedy, ideal = np.mean(rows, axis=0)
        print(f"  q of {name:<14} {coupled:.3f}  {greedy:.3f}  {ideal:.3f}")
    many = [row for row, single in zip(kept["all followers"], kept["one token"], strict=True) if row[2] != single[2]]
    if many:
        coupled, greedy, ideal = np.mean(many, axis=0)
        print(f"  q of several followers, {len(many)} places: {coupled:.3f}  {greedy:.3f}  {ideal:.3f}")


def text_logits(decoder: Decoder, text: list[int], start: int) -> jax.Array:
    """float32 [len(text) - start, V]: what follows each token of `text` from place `start` on."""
    page = 16
    num_pages = -(-len(text) // page)
    cache = create_cache(abstract_cache(decoder.config, num_pages + 1, page, decoder.embedding.dtype))
    positions = jnp.arange(len(text))[None]
    rows = Rows(positions, jnp.arange(1, num_pages + 1)[None], jnp.ones_like(positions, bool))
    hidden, _ = decoder(jnp.array([text]), rows, cache)
    return decoder.logits(hidden[:, start:])[0]


def after_longest_match(text: list[int], longest: int = 3) -> list[int]:
    """The tokens behind all earlier places where the longest suffix (up to `longest` tokens) stood, in order."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        suffix = text[-n:]
        found = [text[at + n] for at in range(len(text) - n) if text[at : at + n] == suffix]
        if found:
            return found
    return []


def rates(log_p: jax.Array, counts: dict[int, int], position: int, num_seeds: int) -> np.ndarray:
    """How often coupled and greedy drafts are the target's sample, and 1 - TV(p, q)."""
    ids = np.array(list(counts))
    q = np.array(list(counts.values())) / sum(counts.values())
    noise, target = draw(log_p, jnp.int32(position), num_seeds)
    coupled = ids[np.argmax(np.log(q) + np.asarray(noise)[:, ids], axis=1)]
    greedy = ids[np.argmax(q)]
    p = np.exp(np.asarray(log_p, np.float64)[ids])
    return np.array([np.mean(coupled == target), np.mean(greedy == target), np.minimum(p, q).sum()])


@jax.jit(static_argnums=2)
def draw(log_p: jax.Array, position: jax.Array, num_seeds: int) -> tuple[jax.Array, jax.Array]:
    """The noise of seeds 0 .. num_seeds - 1 at one position, [seeds, V], and the target's samples, [seeds]."""
    seeds = jnp.stack([jnp.zeros(num_seeds, jnp.uint32), jnp.arange(num_seeds, dtype=jnp.uint32)], axis=1)
    noise = gumbel(seeds, jnp.full((num_seeds, 1), position), log_p.shape[0])[:, 0]
    return noise, jnp.argmax(jax.lax.optimization_barrier(log_p + noise), axis=1)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
