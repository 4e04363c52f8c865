"""transformers in bfloat16, with or without prompt lookup.

usage: python transformers_peer.py prompts.json MODEL.gguf [--prompt-lookup N] [--threads N]
"""

import argparse
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import torch
from report import NUM_TOKENS, read, show, timed
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class TokenQueue(BaseStreamer):
    """Hands over tokens as they come; the prompt, which comes first, is left out."""

    def __init__(self) -> None:
        self.queue: Queue = Queue()
        self.has_seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self.has_seen_prompt:
            for token in value.flatten().tolist():
                self.queue.put(token)
        self.has_seen_prompt = True

    def end(self) -> None:
        self.queue.put(None)

    def __iter__(self) -> Iterator[int]:
        return iter(self.queue.get, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-lookup", type=int)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model.parent, gguf_file=args.model.name, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = 2
    rows = read(args.prompts)

    def ask(ids: list[int]) -> tuple[int, float]:
        stream = TokenQueue()
        options = {"prompt_lookup_num_tokens": args.prompt_lookup} if args.prompt_lookup else {}
        run = threading.Thread(
            target=model.generate,
            args=(torch.tensor([ids]),),
            kwargs={
                "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
                "max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 2, "streamer": stream, **options,
            },
        )  # fmt: skip
        run.start()
        result = timed(stream)
        run.join()
        return result

    ask(rows[0]["ids"])
    name = "transformers bf16" + (f", prompt lookup {args.prompt_lookup}" if args.prompt_lookup else "")
    show(name, rows, [ask(row["ids"]) for row in rows])


if __name__ == "__main__":
    main()
