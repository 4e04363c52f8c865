"""`make demo`: the built-in model answers with and without drafts; the texts agree, the speeds do not."""

import sys

from spec_jax import LLM, SamplingParams, UserError
from spec_jax.checkpoints import fetch

QUESTION = """Summarize in three sentences, quoting the most important phrases:

The James Webb Space Telescope is the largest telescope ever sent into space. Its mirror is made of 18 hexagonal segments
of gold-plated beryllium, which together are 6.5 metres wide. The telescope was launched on 25 December 2021 from French
Guiana and orbits the Sun near the second Lagrange point, about 1.5 million kilometres from Earth. A sunshield of five
layers keeps its instruments below 50 kelvin, so that they can see the infrared light of the first galaxies. The first
full-colour images of the James Webb Space Telescope were shown to the public on 12 July 2022."""


def main() -> None:
    print("fetching smollm2-135m (98 MB, once) ...", flush=True)
    fetch("smollm2-135m")
    prompt = [{"role": "user", "content": QUESTION}]
    params = SamplingParams(max_tokens=160)
    answers = {}
    for draft in ("none", "auto"):
        print(f"loading with draft={draft} (the first start compiles for about half a minute) ...", flush=True)
        llm = LLM("smollm2-135m", draft=draft, max_num_seqs=1, warm_up=prompt)
        llm.generate(prompt, params)  # once untimed: first runs set things up
        shown = 0
        for output in llm.stream(prompt, params):
            print(output.text[shown:], end="", flush=True)
            shown = len(output.text)
        answers[draft] = output
        stats = output.stats
        print(
            f"\n--- draft={draft}: {len(output.token_ids)} tokens in {stats.rounds} passes "
            f"({stats.acceptance_length:.2f} per pass), {1000 * stats.tpot_s:.1f} ms per token\n"
        )
    plain, drafted = answers["none"], answers["auto"]
    same = plain.token_ids == drafted.token_ids
    print(f"same text: {'yes, token for token' if same else 'NO'}")
    print(f"faster: {plain.stats.tpot_s / drafted.stats.tpot_s:.2f} x per token")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"demo: {error}")
