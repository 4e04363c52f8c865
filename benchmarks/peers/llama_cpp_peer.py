"""llama.cpp through llama-cpp-python.

usage: python llama_cpp_peer.py prompts.json MODEL.gguf [--threads N]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llama_cpp import Llama
from report import NUM_TOKENS, read, show, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    llama = Llama(
        model_path=str(args.model), n_ctx=4096, n_threads=args.threads, n_threads_batch=args.threads, verbose=False
    )
    rows = read(args.prompts)

    def tokens(ids: list[int]) -> Iterator[int]:
        llama.reset()
        for count, token in enumerate(llama.generate(ids, temp=0.0, repeat_penalty=1.0, reset=True), 1):
            yield token
            if token == 2 or count == NUM_TOKENS:
                return

    timed(tokens(rows[0]["ids"]))
    show(f"llama.cpp {args.model.stem}", rows, [timed(tokens(row["ids"])) for row in rows])


if __name__ == "__main__":
    main()
