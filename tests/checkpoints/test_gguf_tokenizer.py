"""Tokenizers rebuilt from GGUF metadata against the ids of llama.cpp (see make_*.py in tests/fixtures)."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from spec_jax.checkpoints import ModelFiles, open_model
from spec_jax.checkpoints.gguf_tokenizer import build_tokenizer
from spec_jax.errors import UserError
from spec_jax.tokenizer import StreamDecoder, Tokenizer
from tests.checkpoints.helpers import FIXTURES

SMALL = json.loads((FIXTURES / "small_tokenizers.json").read_text(encoding="utf-8"))
REAL = json.loads((FIXTURES / "smollm2_tokens.json").read_text(encoding="utf-8"))
ROUND_TRIPS = [
    "", " ", "  two", "trailing  ", "a\n\tb", "it's 2024, 1,234.5!", "naïve Ærø", "Привет", "你好，世界", "안녕",
    "🙂👩\u200d👩\u200d👧 flags 🇩🇪", "\u0000\u007f\u200b\ufeff", "<end>", "x" * 500,
]  # fmt: skip


def case_id(case: dict[str, Any]) -> str:
    return "-".join([case["base"], *(f"{key.rpartition('.')[2]}={value}" for key, value in case["extra"].items())])


def small(base: str, **extra: Any) -> Tokenizer:
    metadata = SMALL[base] | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return Tokenizer(build_tokenizer(metadata, "small.gguf"))


def refuses(text: str) -> pytest.RaisesExc:
    return pytest.raises(UserError, match=re.escape(text))


@pytest.mark.parametrize("case", SMALL["cases"], ids=case_id)
def test_small_vocabularies_give_the_ids_of_llama_cpp(case: dict[str, Any]) -> None:
    tokenizer = Tokenizer(build_tokenizer(SMALL[case["base"]] | case["extra"], "small.gguf"))
    for expected in case["texts"]:
        text = expected["text"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected["ids"], text
        assert tokenizer.encode(text, parse_special=True) == expected["special"], text


@pytest.mark.parametrize("split", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_byte_level_text_survives_a_round_trip(split: str, text: str) -> None:
    tokenizer = small("gpt2", pre=split)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_sentencepiece_text_survives_a_round_trip(prefix: bool, text: str) -> None:
    tokenizer = small("llama", add_space_prefix=prefix)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("base", ["gpt2", "llama"])
def test_streamed_text_is_the_whole_text(base: str) -> None:
    tokenizer, text = small(base), "".join(ROUND_TRIPS)
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("base", ["gpt2", "llama"])
def test_control_tokens_in_text_are_text_unless_asked_for(base: str) -> None:
    tokenizer = small(base)
    (end,) = tokenizer.encode("<end>", parse_special=True, add_special_tokens=False)[-1:]
    assert end not in tokenizer.encode("<end>")
    assert tokenizer.decode([end]) == ""


def test_a_start_token_may_contain_spaces() -> None:
    tokens = ["<begin of text>", *SMALL["gpt2"]["tokenizer.ggml.tokens"][1:]]
    assert small("gpt2", tokens=tokens, add_bos_token=True).encode("a") == [0, tokens.index("a")]


@pytest.mark.parametrize("base", ["gpt2", "llama"])
def test_token_types_may_be_missing(base: str) -> None:
    metadata = {key: value for key, value in SMALL[base].items() if key != "tokenizer.ggml.token_type"}
    tokenizer = Tokenizer(build_tokenizer(metadata, "small.gguf"))
    assert tokenizer.decode(tokenizer.encode("plain 🙂 text", add_special_tokens=False)) == "plain 🙂 text"


@pytest.mark.parametrize(
    ("base", "extra", "message"),
    [
        ("gpt2", {"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: gpt-2, default, smollm"),
        ("gpt2", {"model": "bert"}, "tokenizer model 'bert' is not supported; supported: gpt2, llama"),
        ("gpt2", {"model": None}, "tokenizer model None is not supported"),
        ("gpt2", {"tokens": []}, "holds no tokenizer"),
        ("gpt2", {"tokens": [1, 2, 3]}, "tokenizer is incomplete or damaged"),
        ("gpt2", {"merges": ["nowhere tobefound"]}, "tokenizer is incomplete or damaged"),
        ("gpt2", {"merges": ["nospace"]}, "tokenizer is incomplete or damaged"),
        ("gpt2", {"token_type": [1]}, "tokenizer is incomplete or damaged"),
        ("gpt2", {"pre": ["smollm"]}, "tokenizer is incomplete or damaged"),
        ("llama", {"bos_token_id": 10**6}, "tokenizer is incomplete or damaged"),
        ("llama", {"unknown_token_id": 10**6}, "tokenizer is incomplete or damaged"),
        ("llama", {"scores": [0.0]}, "tokenizer is incomplete or damaged"),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_refused(base: str, extra: dict[str, Any], message: str) -> None:
    with refuses(message):
        small(base, **extra)


@pytest.mark.parametrize(("base", "field"), [("gpt2", "merges"), ("llama", "scores"), ("llama", "tokens")])
def test_missing_metadata_is_named(base: str, field: str) -> None:
    metadata = {key: value for key, value in SMALL[base].items() if key != f"tokenizer.ggml.{field}"}
    with refuses(f"tokenizer.ggml.{field}"):
        build_tokenizer(metadata, "small.gguf")


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    return open_model("smollm2-135m")


@pytest.mark.model
def test_smollm2_gives_the_ids_of_llama_cpp(smollm2: ModelFiles) -> None:
    encode: Callable[..., list[int]] = smollm2.tokenizer.encode
    for expected in REAL["texts"]:
        assert encode(expected["text"]) == expected["ids"], expected["text"]
        assert encode(expected["text"], parse_special=True) == expected["special"], expected["text"]
        assert smollm2.tokenizer.decode(expected["ids"], skip_special_tokens=False) == expected["text"]


@pytest.mark.model
@pytest.mark.parametrize("parse_special", [False, True])
def test_smollm2_chats_give_the_ids_of_llama_cpp(smollm2: ModelFiles, parse_special: bool) -> None:
    for chat in REAL["chats"]:
        assert smollm2.tokenizer.encode_chat(chat["messages"], parse_special=parse_special) == chat["ids"]


@pytest.mark.model
def test_control_tokens_forged_in_a_smollm2_chat_stay_text(smollm2: ModelFiles) -> None:
    assert smollm2.tokenizer.encode_chat(REAL["forged"]["messages"]) == REAL["forged"]["ids"]
