"""The benchmark's prompts as token ids, for engines that are not this one."""

import json
from pathlib import Path

import tyro

from spec_jax.bench import read_questions
from spec_jax.checkpoints import open_model


def main(dataset: Path, output: Path, per_category: int = 2, model: str = "smollm2-135m") -> None:
    tokenizer = open_model(model).tokenizer
    questions = read_questions(dataset, per_category)
    rows = [{"category": q.category, "ids": tokenizer.encode_chat(q.prompt)} for q in questions]
    output.write_text(json.dumps(rows))


if __name__ == "__main__":
    tyro.cli(main)
