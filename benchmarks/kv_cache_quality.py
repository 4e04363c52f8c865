"""What a float8 cache costs: perplexity and greedy agreement against the model's own dtype, on the same texts.

    python benchmarks/kv_cache_quality.py --dataset spec_bench.jsonl --per-category 3

Each question is answered greedily with the usual cache. Question and answer are then scored as one given text with either
cache (teacher forcing), so that both are asked the same thing at every position. Last, the float8 cache answers freely.
"""

import argparse
import json
import math
from pathlib import Path

from spec_jax import LLM, SamplingParams
from spec_jax.bench import read_questions

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--dataset", type=Path, required=True)
parser.add_argument("--per-category", type=int, default=3)
parser.add_argument("--max-tokens", type=int, default=128)
parser.add_argument("--dtype", default="bfloat16")
args = parser.parse_args()

questions = read_questions(args.dataset, args.per_category)
models = {cache: LLM(args.model, dtype=args.dtype, kv_cache_dtype=cache, max_num_seqs=1) for cache in ("auto", "fp8")}
scores: dict[str, list[tuple[float, int]]] = {cache: [] for cache in models}  # log-probability of the text, best token
same_texts = same_tokens = all_tokens = 0
for number, question in enumerate(questions, 1):
    ask = SamplingParams(max_tokens=args.max_tokens)
    answers = {cache: llm.generate([question.prompt], ask)[0] for cache, llm in models.items()}
    text = [*answers["auto"].prompt_token_ids, *answers["auto"].token_ids]
    for cache, llm in models.items():
        [output] = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=1))
        for token, entries in zip(text[1:], output.prompt_logprobs[1:], strict=True):
            best = min(entries, key=lambda t: entries[t].rank)
            scores[cache].append((entries[token].logprob, best))
    pair = [answers[cache].token_ids for cache in models]
    same = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    same_texts += pair[0] == pair[1]
    same_tokens, all_tokens = same_tokens + same, all_tokens + len(pair[0])
    print(f"{number} of {len(questions)}", flush=True)

perplexity = {c: math.exp(-sum(logprob for logprob, _ in found) / len(found)) for c, found in scores.items()}
agreement = sum(a[1] == b[1] for a, b in zip(*scores.values(), strict=True)) / len(scores["auto"])
print(
    json.dumps(
        {
            "questions": len(questions), "tokens": len(scores["auto"]), "perplexity": perplexity,
            "perplexity_ratio": perplexity["fp8"] / perplexity["auto"], "greedy_agreement": agreement,
            "identical_answers": same_texts, "tokens_before_the_first_difference": same_tokens / all_tokens,
        },
        indent=1,
    )
)  # fmt: skip
