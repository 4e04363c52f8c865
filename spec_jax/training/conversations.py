"""Texts to train a draft head on: the target's own answers, to given prompts or to user turns that it writes itself.

An instruct model that continues its own chat prefix writes a user turn (the idea of Magpie, arXiv 2406.08464); it is then
asked that turn. So a head can be trained without any data.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import UserError
from ..llm import LLM
from ..params import SamplingParams
from ..request import RequestOutput
from ..tokenizer import Tokenizer

# Half of the user turns begin with one of these, so that every kind of task occurs; the model writes the rest.
_OPENINGS = (
    "Write a", "Write an", "Write a short story about", "Write a Python function that", "Write an email to",
    "Imagine you", "Explain", "Explain how", "Explain why", "Describe", "Give me", "List", "Compare", "Create a",
    "Suggest", "Pretend to be", "Summarize the following text:", "Summarize this article in a few sentences:",
    "Translate this German sentence to English:", "Translate the following sentence into",
    "Rewrite the following sentence", "Extract the names from this text:",
    "Read the passage and answer the question.", "Use the documents below to answer the question.", "Classify",
    "Who", "Who was the first", "What is", "What are the", "When did", "Where is", "Which", "Why do", "How do I",
    "How many", "Solve this problem:", "If a train", "A store sells", "Tom has", "There are", "Calculate",
    "Find the value of", "Let x be", "Prove that", "Implement", "What does this code do?", "Is it true that",
    "Can you", "I want to", "Tell me about",
)  # fmt: skip
_USER_TURN = SamplingParams(temperature=0.9, min_p=0.02)
_ANSWER_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # in turn: heads serve greedy and sampled text


@dataclass(frozen=True)
class Conversation:
    """Token ids of a prompt, chat template included, and of the target's answer. `index` numbers the asked ones."""

    index: int
    prompt: list[int]
    answer: list[int]


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file that `write_conversations` made, but for those that came out empty."""
    return [conversation for conversation in _read_all(path) if conversation.answer]


def _read_all(path: Path) -> list[Conversation]:
    """A line that a kill cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    try:
        return [Conversation(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, and the conversations are made anew") from None


def write_conversations(
    llm: LLM,
    path: Path,
    number: int,
    prompts: Sequence[str] | None,
    *,
    max_user_tokens: int,
    max_answer_tokens: int,
    seed: int = 0,
) -> Iterator[int]:
    """Asks `llm` until `number` turns were asked, appends what it says to `path`, and yields how many were asked so far.

    Goes on where an earlier run stopped; in float32, with the same result. `prompts` None lets the model write them. Turns
    that come out empty, or too long, stand there without an answer.
    """
    batch = 4 * llm.engine.config.max_num_seqs
    known = _read_all(path)
    start = known[-1].index // batch * batch if known else 0
    if known and known[-1].index == min(start + batch, number) - 1:
        start = known[-1].index + 1
    kept = [conversation for conversation in known if conversation.index < start]
    path.write_text("".join(map(_line, kept)), encoding="utf-8")  # a part of a batch is asked anew
    turns = _GivenTurns(prompts) if prompts is not None else _WrittenTurns(llm.tokenizer, max_user_tokens, seed)
    room = llm.engine.config.max_model_len - max_answer_tokens
    jobs = turns.jobs(range(start, min(start + batch, number)))
    asked = turns.texts(jobs, llm.generate([job.prompt for job in jobs], [job.params for job in jobs]))
    while start < number:
        end = min(start + batch, number)
        answers = []
        for index, text in asked.items():
            prompt = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
            if len(prompt) <= room:
                params = SamplingParams(
                    max_tokens=max_answer_tokens,
                    temperature=_ANSWER_TEMPERATURES[index % len(_ANSWER_TEMPERATURES)],
                    seed=_seed(seed, index, 1),
                )
                answers.append(_Job(index, prompt, params))
        # The next batch's turns come along behind the answers: they are short, so that no slot is idle for long.
        jobs = turns.jobs(range(end, min(end + batch, number)))
        every = answers + jobs
        outputs = llm.generate([job.prompt for job in every], [job.params for job in every]) if every else []
        made = [
            Conversation(job.index, job.prompt, list(output.token_ids))
            for job, output in zip(answers, outputs, strict=False)
        ]
        answered = {conversation.index: conversation for conversation in made}
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(_line(answered.get(i, Conversation(i, [], []))) for i in range(start, end)))
        asked = turns.texts(jobs, outputs[len(answers) :])
        start = end
        yield start


@dataclass(frozen=True)
class _Job:
    index: int
    prompt: list[int]
    params: SamplingParams


class _GivenTurns:
    """User turns from a file: nothing is generated for them."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts = prompts
        self._asked: Sequence[int] = ()

    def jobs(self, indices: Sequence[int]) -> list[_Job]:
        self._asked = indices
        return []

    def texts(self, jobs: Sequence[_Job], outputs: Sequence[RequestOutput]) -> dict[int, str]:
        return {index: self._prompts[index] for index in self._asked}


class _WrittenTurns:
    """User turns that the model writes where a user would."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, seed: int):
        self._prefix, self._tokenizer = tokenizer.user_prefix(), tokenizer
        self._max_tokens, self._seed = max_tokens, seed

    def jobs(self, indices: Sequence[int]) -> list[_Job]:
        return [
            _Job(
                index,
                self._prefix + self._tokenizer.encode(_opening(index), add_special_tokens=False),
                replace(_USER_TURN, max_tokens=self._max_tokens, seed=_seed(self._seed, index, 0)),
            )
            for index in indices
        ]

    def texts(self, jobs: Sequence[_Job], outputs: Sequence[RequestOutput]) -> dict[int, str]:
        texts = {job.index: (_opening(job.index) + out.text).strip() for job, out in zip(jobs, outputs, strict=True)}
        return {index: text for index, text in texts.items() if text}


def _opening(index: int) -> str:
    return _OPENINGS[index // 2 % len(_OPENINGS)] if index % 2 else ""


def read_prompts(path: Path) -> list[str]:
    """User turns, from a JSONL file with `prompt` or `turns` (the first counts), or one per line of a text file."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts {path}: {error}") from None
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            prompts.append(raw["prompt"] if "prompt" in raw else raw["turns"][0])
            if not isinstance(prompts[-1], str):
                raise TypeError("a prompt must be text")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"{path} line {number} has no prompt: {error!r}") from None
    return prompts


def _seed(seed: int, index: int, stage: int) -> int:
    return (seed << 40) + 2 * index + stage


def _line(conversation: Conversation) -> str:
    return json.dumps(asdict(conversation)) + "\n"
