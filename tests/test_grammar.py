"""Constrained output: finished texts follow their grammar, with any drafts and in any company; bad grammars are refused."""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product, zip_longest
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from spec_jax import LLM, SamplingParams, UserError
from spec_jax.grammar import Grammar, GrammarCompiler
from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from spec_jax.request import Request
from spec_jax.tokenizer import Tokenizer
from tests.conftest import TINY, write_model_folder
from tests.test_engine import TOKENIZER, assert_empty, finish

EOS = TINY.eos_token_ids[0]
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # a random model would write little but white space


# --- random schemas and what is valid against them --------------------------------------------------------------------


class SchemaMaker:
    """Random schemas whose texts are short."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._defs: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        schema = self._random.choice([self._object, self._object, self._array, self._any_of, self._ref, self._any])(2)
        return schema | ({"$defs": self._defs} if self._defs else {}) | COMPACT

    def _any(self, depth: int) -> dict[str, Any]:
        leaves = [self._integer, self._string, self._enum, self._const, self._plain]
        branches = [self._object, self._object, self._array, self._any_of, self._ref]
        makers = [lambda make=make: make(depth) for make in branches] * 2 if depth else []
        return self._random.choice(makers + leaves)()

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["a", "b", "name", "é", 'q"', ""], self._random.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": [name for name in names if self._random.random() < 0.6],
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": most}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randint(2, 3))]}

    def _ref(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}
        self._defs[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _integer(self) -> dict[str, Any]:
        least = self._random.randint(-1200, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + self._random.choice([0, 5, 700])}

    def _string(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self._random.randint(0, 4)}

    def _scalar(self) -> Any:
        return self._random.choice([None, True, False, 0, 7, -12, "", "x", "two words", 'é"\\\n', "long " * 3])

    def _enum(self) -> dict[str, Any]:
        return {"enum": [self._scalar() for _ in range(self._random.randint(1, 4))]}

    def _const(self) -> dict[str, Any]:
        return {"const": self._random.choice([self._scalar(), [1, [None]], {"k": self._scalar()}])}

    def _plain(self) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null"])}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """JSON Schema for the keywords that `SchemaMaker` uses."""
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return any(is_valid(value, branch, root) for branch in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        allowed = [schema["const"]] if "const" in schema else schema["enum"]
        return json.dumps(value) in map(json.dumps, allowed)  # as texts: True is not 1
    if schema["type"] == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(is_valid(part, schema["properties"][name], root) for name, part in value.items())
        )
    if schema["type"] == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(is_valid(part, schema["items"], root) for part in value)
        )
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return isinstance(value, bool) if schema["type"] == "boolean" else value is None


REGEXES = [
    "a", "abc|abd", "[ab]{3,9}", "(ab|c)*d", "[0-9]{4}-[0-9]{2}-[0-9]{2}", "(yes|no|maybe)( (yes|no|maybe)){0,3}", ".{0,12}",
    "[^a-z]{1,9}", "[é🎉日]{2,4}", "(?i)hallo", r"\{\"x\": -?[1-9][0-9]{0,3}\}", "a?b?c?d?", "((a|b)(c|d)){2}e|f",
    r"[\\/]{2,5}", r"(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}[0-9]", "x*",
]  # fmt: skip


@cache
def cases() -> list[tuple[str, SamplingParams]]:
    """Prompts, and parameters with a grammar each: 200 schemas and the regexes, greedy and sampled."""
    grammars = [{"json_schema": SchemaMaker(seed).make()} for seed in range(200)] + [{"regex": r} for r in REGEXES]
    prompts = ["", "Answer: ", '{"a": 1, "b": [true, "x"]}\n', "abab", "日本"]
    return [
        (f"{prompts[i % 5]}{i}", SamplingParams(**grammar, max_tokens=180, temperature=temperature, seed=i))
        for i, grammar in enumerate(grammars)
        for temperature in (0.0, 1.0)
    ]


def texts(llm: LLM, chosen: Sequence[tuple[str, SamplingParams]]) -> list[tuple[tuple[int, ...], str, str | None]]:
    prompts, params = zip(*chosen, strict=True)
    return [(o.token_ids, o.text, o.finish_reason) for o in llm.generate(list(prompts), list(params))]


@pytest.fixture(scope="module")
def llms(tiny_folder):
    """One model per number of drafts; every test must leave it empty."""

    @cache
    def get(k: int) -> LLM:
        slots = 4 if k in (0, 5) else 2  # each number of them is a program to compile
        return LLM(str(tiny_folder), dtype="float32", num_draft_tokens=k, max_num_seqs=slots, rounds_per_burst=4)

    yield get
    for k in (0, 5):
        assert_empty(get(k).engine)


@pytest.fixture(scope="module")
def plain_texts(llms):
    """What plain decoding says to all cases."""
    return texts(llms(0), cases())


def test_a_text_that_stops_follows_its_schema_or_regex(plain_texts):
    for (_, params), (token_ids, text, finish_reason) in zip(cases(), plain_texts, strict=True):
        if finish_reason != "stop":
            assert (finish_reason, len(token_ids)) == ("length", params.max_tokens)
        elif params.regex is not None:
            assert re.fullmatch(params.regex, text), (params.regex, text)
        else:
            schema = json.loads(params.json_schema)
            assert is_valid(json.loads(text), schema, schema), (schema, text)
    assert sum(reason == "stop" for _, _, reason in plain_texts) >= 0.95 * len(plain_texts)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("k", "step"), [slow(5, 1), (2, 11), slow(1, 11), slow(3, 11), slow(4, 11)])
def test_drafts_do_not_change_a_constrained_text(llms, plain_texts, k, step):
    assert texts(llms(k), cases()[::step]) == plain_texts[::step]


def test_drafts_pay_where_a_grammar_forces_tokens_and_where_a_text_comes_again(llms):
    schema = {"type": "object", "properties": {"a long name": {"const": "a long value"}, "n": {"type": "integer"}}}
    forced = SamplingParams(json_schema=schema | {"required": ["a long name"]} | COMPACT, max_tokens=60)
    repeated = SamplingParams(regex="[a-z]{30}")
    [first] = llms(0).generate("x", repeated)
    for prompt, params in (("x", forced), (first.text + " " + first.text + " x", repeated)):
        [plain], [drafted] = llms(0).generate(prompt, params), llms(5).generate(prompt, params)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.rounds < plain.stats.rounds == len(plain.token_ids)
    assert llms(5).generate("x", forced)[0].stats.acceptance_length > 3


def test_drafts_that_hold_the_end_of_text_change_nothing(llms, plain_texts):
    """A conversation holds the end of a text that follows the grammar; what came after it is proposed as well."""
    chosen = [
        ([*TOKENIZER.encode(prompt), *token_ids, *token_ids, *token_ids], replace(params, max_tokens=60))
        for (prompt, params), (token_ids, _, finish_reason) in zip(cases(), plain_texts, strict=True)
        if finish_reason == "stop" and len(token_ids) < 40
    ][::5]
    plain = texts(llms(0), chosen)
    assert texts(llms(5), chosen) == plain
    assert sum(reason == "stop" for _, _, reason in plain) > 0.8 * len(chosen)


# --- one grammar, followed by hand ------------------------------------------------------------------------------------

LANGUAGES = [
    "abc|abd",
    "a{0,3}b?",
    "(ab|ac)d?",
    "[ab]{2,4}c",
    "(a|bc){1,3}",
    "abcabc",
    "(a|ab)(c|bcd)d{0,2}",
    "((a?b){2}|c)d?",
    "a",
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, TINY.vocab_size, TINY.eos_token_ids)


@cache
def words(regex: str) -> frozenset[str]:
    """All texts of up to 7 letters that match, by trying every one."""
    letters = ("".join(word) for length in range(8) for word in product("abcd", repeat=length))
    return frozenset(word for word in letters if re.fullmatch(regex, word))


def allowed_after(regex: str, text: str) -> set[int]:
    """Ids that may follow; of texts short enough that `words` knows all of their continuations that matter."""
    following = {word[len(text)] for word in words(regex) if word.startswith(text) and len(word) > len(text)}
    return {TOKENIZER.encode(letter)[0] for letter in following} | ({EOS} if text in words(regex) else set())


def forced_after(regex: str, text: str) -> list[int]:
    forced: list[int] = []
    while len(allowed := allowed_after(regex, text)) == 1 and EOS not in allowed:
        forced += allowed
        text += TOKENIZER.decode(list(allowed))
    return forced


def ids(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def positions(regex: str) -> list[str]:
    return sorted({word[:length] for word in words(regex) for length in range(min(len(word), 5) + 1)})


def planned(grammar: Grammar, proposed: Sequence[int], max_drafts: int) -> tuple[list[int], list[set[int]]]:
    drafts, masks = grammar.plan(proposed, max_drafts)
    return drafts, [ids(mask) for mask in masks]


@pytest.mark.parametrize("regex", LANGUAGES)
def test_masks_are_those_of_trying_every_text_and_drafts_end_where_the_grammar_breaks(compiler, regex):
    rng = random.Random(regex)
    letters = [*TOKENIZER.encode("abcd"), EOS]
    for text in positions(regex):
        grammar = compiler.compile(SamplingParams(regex=regex))
        grammar.accept(TOKENIZER.encode(text))
        for _ in range(20):
            likely = TOKENIZER.encode(rng.choice(sorted(words(regex)))[len(text) :])
            proposed = (likely + rng.choices([*letters, 0, 258], k=2))[: rng.randint(0, 6)]
            max_drafts = rng.randint(0, 6)
            drafts, masks = planned(grammar, proposed, max_drafts)
            assert grammar.error is None
            assert (drafts, masks) == planned(grammar, proposed, max_drafts)  # it left the state as it was
            assert len(masks) == len(drafts) + 1
            reached = text
            for place, mask in enumerate(masks):
                assert mask == ({EOS} if EOS in drafts[:place] else allowed_after(regex, reached))
                forced = forced_after(regex, reached)
                goes_on = proposed[place:] if proposed[:place] == drafts[:place] and EOS not in drafts[:place] else []
                wanted = (forced or goes_on)[:1]
                if place < len(drafts):
                    assert drafts[place : place + 1] == wanted
                    assert drafts[place] in mask
                elif place < max_drafts and wanted:
                    assert wanted[0] not in mask or mask == {EOS}  # the end of the grammar needs no draft
                reached += TOKENIZER.decode(drafts[place : place + 1])


@pytest.mark.parametrize("regex", LANGUAGES)
def test_accepting_at_once_token_by_token_or_draft_by_draft_leads_to_the_same_place(compiler, regex):
    for text in positions(regex):
        tokens = TOKENIZER.encode(text)
        grammars = [compiler.compile(SamplingParams(regex=regex)) for _ in range(3)]
        grammars[0].accept(tokens)
        for token in tokens:
            grammars[1].accept([token])
        rest = tokens
        while rest:
            drafts, _ = grammars[2].plan(rest, 2)
            kept = max(1, len(drafts))
            grammars[2].accept(rest[:kept])
            rest = rest[kept:]
        assert all(planned(grammar, (), 0)[1] == [allowed_after(regex, text)] for grammar in grammars)


@pytest.mark.parametrize("vocab_size", [259, 287, 288, 289, 320])
def test_a_mask_has_a_bit_per_score_of_the_model_and_none_beyond_the_tokenizer(vocab_size):
    grammar = GrammarCompiler(TOKENIZER, vocab_size, (EOS,)).compile(SamplingParams(regex="[^a]"))
    _, masks = grammar.plan((), 5)
    assert all(mask.shape == (-(-vocab_size // 32),) for mask in masks)
    assert max(ids(masks[0])) < 259


# --- in company -------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
} | COMPACT
FREE = [
    SamplingParams(max_tokens=50, ignore_eos=True),
    SamplingParams(max_tokens=45, ignore_eos=True, temperature=0.9, seed=4),
    SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=40, temperature=1.2, seed=2, logprobs=1, repetition_penalty=1.3, min_tokens=30),
]
CONSTRAINED = [
    SamplingParams(max_tokens=60, json_schema=PERSON, temperature=1.0, seed=1),
    SamplingParams(max_tokens=60, regex="[a-c]{20,30}(x|yz)", logprobs=2),
    SamplingParams(max_tokens=60, regex="([a-z]{3} )*[.!]", temperature=0.7, seed=8, top_p=0.9, logit_bias={67: 2.0}),
]


@pytest.mark.parametrize("k", [5, slow(0)])
def test_in_a_mixed_batch_each_text_and_its_logprobs_are_those_it_has_alone(llms, k):
    prompts = [f"prompt {i} {i} {i}" for i in range(7)]
    params = [param for pair in zip_longest(FREE, CONSTRAINED) for param in pair if param]
    alone = [llms(k).generate(*both)[0] for both in zip(prompts, params, strict=True)]
    for order in (range(7), [6, 3, 1, 5, 0, 2, 4], [1, 3, 5, 1, 3, 5, 0, 0, 2, 4, 6]):
        together = llms(k).generate([prompts[i] for i in order], [params[i] for i in order])
        for i, output in zip(order, together, strict=True):
            assert output.token_ids == alone[i].token_ids
            assert (output.text, output.finish_reason) == (alone[i].text, alone[i].finish_reason)
            for found, expected in zip(output.logprobs or (), alone[i].logprobs or (), strict=True):
                assert list(found) == list(expected)
                np.testing.assert_allclose(
                    [entry.logprob for entry in found.values()], [e.logprob for e in expected.values()], atol=1e-4
                )
            assert len(output.logprobs or ()) in (0, len(output.token_ids))


def test_completions_of_one_prompt_each_follow_the_grammar_with_a_seed_of_their_own(llms):
    params = SamplingParams(n=4, max_tokens=60, json_schema=PERSON, temperature=1.0, seed=11)
    free, [output] = llms(5).generate("free", FREE[0]), llms(5).generate("x", params)
    _, beside = llms(5).generate(["free", "x"], [FREE[0], params])
    assert [o.token_ids for o in beside.outputs] == [o.token_ids for o in output.outputs]
    for i, completion in enumerate(output.outputs):
        [single] = llms(5).generate("x", replace(params, n=1, seed=11 + i))
        assert completion.token_ids == single.token_ids
    assert len({completion.text for completion in output.outputs}) > 1
    assert llms(5).generate("free", FREE[0])[0].token_ids == free[0].token_ids


@pytest.mark.parametrize("params", [*CONSTRAINED, FREE[0]])
def test_streams_grow_into_the_text_of_generate_while_others_run(llms, params):
    llm = llms(5)
    [whole], [other] = llm.generate("hello", params), llm.generate("other", CONSTRAINED[0])
    first, second = llm.stream("hello", params), llm.stream("other", CONSTRAINED[0])
    pairs = list(zip_longest(first, second))
    grown = [output.text for output, _ in pairs if output]
    assert grown[-1] == whole.text
    assert all(whole.text.startswith(text) for text in grown)
    assert [output for _, output in pairs if output][-1].token_ids == other.token_ids


def start(llm: LLM, prompt: str, params: SamplingParams) -> Request:
    [request] = llm._requests(prompt, params, False)
    llm.engine.add(request)
    return request


@pytest.mark.parametrize("k", [5, slow(0)])
@pytest.mark.parametrize("params", CONSTRAINED)
def test_preemption_in_the_middle_changes_nothing(llms, k, params):
    llm = llms(k)
    [expected], [free] = llm.generate("hello", params), llm.generate("free", FREE[0])
    for pauses in ([0], [1], [2], [3], [6], [9], [1, 1, 1, 1], [2, 5, 1]):
        request, other = start(llm, "hello", params), start(llm, "free", FREE[0])
        for steps in pauses:
            for _ in range(steps):
                llm.engine.step()
            llm.engine.preempt(request)
        finish(llm.engine, [])
        assert (tuple(request.output), request.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert tuple(other.output) == free.token_ids


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_abort_in_the_middle_frees_the_slot_and_disturbs_nobody(llms, steps):
    llm = llms(5)
    [expected], [free] = llm.generate("kept", CONSTRAINED[1]), llm.generate("free", FREE[0])
    dropped, kept, other = (
        start(llm, prompt, params)
        for prompt, params in (("hello", CONSTRAINED[2]), ("kept", CONSTRAINED[1]), ("free", FREE[0]))
    )
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort(dropped)
    assert dropped.slot == -1
    assert dropped not in llm.engine.scheduler.running.values()
    late = start(llm, "kept", CONSTRAINED[1])
    finish(llm.engine, [])
    assert tuple(kept.output) == tuple(late.output) == expected.token_ids
    assert tuple(other.output) == free.token_ids
    assert_empty(llm.engine)


def test_a_stop_string_and_a_stop_id_end_a_constrained_text_early(llms):
    plain = SamplingParams(regex="(abcd){5}", max_tokens=40)
    [by_text] = llms(5).generate("x", replace(plain, stop=["da"]))
    [by_id] = llms(5).generate("x", replace(plain, stop_token_ids=TOKENIZER.encode("c")))
    assert (by_text.text, by_text.stop_reason) == ("abc", "da")
    assert (by_id.text, by_id.stop_reason) == ("abc", TOKENIZER.encode("c")[0])


def test_no_bias_leads_out_of_the_grammar(llms):
    bias = dict.fromkeys(TOKENIZER.encode("xyz!"), 100.0) | dict.fromkeys(TOKENIZER.encode("ab"), -100.0)
    [output] = llms(5).generate("x", SamplingParams(regex="[ab]{8}", logit_bias=bias, repetition_penalty=50.0))
    assert re.fullmatch("[ab]{8}", output.text)


# --- what goes wrong in the middle ------------------------------------------------------------------------------------

EXPLODES = SamplingParams(regex="((a{1,100}){1,100}){1,100}", max_tokens=200, logit_bias={EOS: -100.0})


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone_and_says_why(llms):
    llm = llms(5)
    params = [FREE[0], EXPLODES, CONSTRAINED[0], EXPLODES]
    alone = [llm.generate("hello", p)[0] for p in (FREE[0], CONSTRAINED[0])]
    free, broken, kept, twin = llm.generate(["hello"] * 4, params)
    for output in (broken, twin):
        assert output.finish_reason == "error"
        assert "too many expressions" in output.stop_reason
        assert re.fullmatch("a+", output.text)
    assert [free.token_ids, kept.token_ids] == [output.token_ids for output in alone]
    assert_empty(llm.engine)
    assert list(llm.stream("hello", EXPLODES))[-1].finish_reason == "error"
    assert llm.generate("hello", FREE[0])[0].token_ids == free.token_ids


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_grammar_that_is_lost_ends_its_request_at_the_next_step(llms, steps):
    llm = llms(5)
    [expected] = llm.generate("free", FREE[0])
    request, other = start(llm, "hello", CONSTRAINED[1]), start(llm, "free", FREE[0])
    for _ in range(steps):
        llm.engine.step()
    request.grammar.accept(TOKENIZER.encode("Z"))
    assert request.grammar.error
    finish(llm.engine, [])
    assert (request.finish_reason, request.stop_reason) == ("error", request.grammar.error)
    assert tuple(other.output) == expected.token_ids
    assert_empty(llm.engine)


# --- what is no grammar, or too much of one ---------------------------------------------------------------------------


def nested(depth: int, start: str = '{"type":"array","items":', end: str = "}") -> str:
    return start * depth + '{"type":"null"}' + end * depth


def properties(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(number)}} | more


def chain(length: int, link: Callable[[dict[str, str]], Any]) -> dict[str, Any]:
    """A schema whose definitions lead from one to the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$defs": defs | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


REFUSED_REGEXES = {
    "(": "unclosed group", "[": "unclosed character class", "a{2,1}": "invalid repetition count", "*": "missing expression",
    "a(?=b)": "look-around", "(?<!a)b": "look-around", r"(a)\1": "backreferences", r"\bfoo\b": "not supported",
    "$a": "not supported", "a{99999999999}": "decimal literal invalid", r"(?-u)\xff": "invalid UTF-8", "\\": "backslash",
    "ab\\": "backslash", "\ud800": "surrogates", r"[^\x{0}-\x{10FFFF}]": "no text matches it", "(" * 300 + ")" * 300: "",
    "(a{1000}){1000}": "too many expressions", "a{4000000000}": "too many expressions", "((a{60}){60}b){60}": "too many",
    "(" * 60 + "a" + "){2}" * 60: "too many", "a" * 100_000: "100000 characters: at most", "(a?){1000}a{1000}": "too many",
}  # fmt: skip

REFUSED_SCHEMAS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is no JSON"),
    "a list": ("[]", "allowed is a JSON schema"),
    "a number": (5, "allowed is a JSON schema"),
    "a set inside": ({"enum": {1}}, "cannot be written as JSON"),
    "not": ({"not": {"type": "null"}}, "not"),
    "if": ({"if": {"type": "null"}, "then": {"type": "null"}}, "if"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "remote $ref": ({"$ref": "https://example.com/x.json"}, "example.com"),
    "$ref to nothing": ({"$ref": "#/$defs/no"}, "does not exist"),
    "$ref to itself": ({"$ref": "#"}, "no text matches it"),
    "false": ("false", "schema is false"),
    "unknown type": ({"type": "strin"}, "strin"),
    "type of no type": ({"type": 5}, "type must be"),
    "empty enum": ({"enum": []}, "Unsatisfiable"),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    "impossible property": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
    "two types": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    "NaN": ({"const": float("nan")}, "json_schema"),
    "half a character": ({"const": "\ud800"}, "json_schema"),
    "half a character as text": ('{"const": "\ud800"}', "json_schema"),
    "unknown format": ({"type": "string", "format": "nope"}, "nope"),
    "look-ahead": ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
    "huge pattern": ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "too many expressions"),
    "huge minLength": ({"type": "string", "pattern": "^a*$", "minLength": 10**6} | COMPACT, "too many expressions"),
    "deep": (nested(2000), "recursion limit"),
    "very deep": (nested(100_000), "recursion"),
    "deep objects": (nested(2000, '{"properties":{"a":', "}}"), "recursion limit"),
    "a million items": ({"type": "array", "minItems": 10**6, "items": {"const": None}} | COMPACT, "Too many items"),
    "5,000 properties": (properties(5000), "characters: at most"),
    "2,000 properties": (properties(2000, additionalProperties=False), "2000"),
    "enum of 20,000 strings": ({"enum": [f"value number {i}" for i in range(20_000)]}, "characters: at most"),
    "enum of 3,000 objects": ({"enum": [{"a": i} for i in range(3000)]}, "3000"),
    "large multipleOf": ({"type": "integer", "multipleOf": 5_000_011}, "5000011, at most"),
    "multipleOf that meet": ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "too complex"),
    "patterns that meet": ({"type": "string", "allOf": [{"pattern": f"[a-z]{{{i}}}x.*"} for i in range(30)]}, "patterns"),
    "patterns along $ref": (
        {"$defs": {f"d{i}": {"pattern": f"[a-z]{{{i}}}x.*", "$ref": f"#/$defs/d{i + 1}"} for i in range(30)}},
        "patterns",
    ),
    "400 patternProperties": ({"patternProperties": {f"^k{i}$": {} for i in range(400)}}, "patternProperties is 400"),
    "2 ** 12 combinations": (
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(2)]} for i in range(12)]}, "too large"
    ),
}  # fmt: skip


def refused(compiler: GrammarCompiler, **grammar: Any) -> str:
    began = time.process_time()
    with pytest.raises(UserError) as error:
        compiler.compile(SamplingParams(**grammar))
    assert time.process_time() - began < 10  # of processor time: mostly far below one
    return str(error.value)


@pytest.mark.parametrize("regex", REFUSED_REGEXES, ids=lambda regex: ascii(regex[:20]))
def test_a_regex_that_cannot_be_used_is_refused_soon_with_the_reason(compiler, regex):
    message = refused(compiler, regex=regex)
    assert message.startswith("regex ")
    assert REFUSED_REGEXES[regex] in message
    assert len(message) < 500


@pytest.mark.parametrize("name", REFUSED_SCHEMAS)
def test_a_schema_that_cannot_be_used_is_refused_soon_with_the_reason(compiler, name):
    schema, reason = REFUSED_SCHEMAS[name]
    message = refused(compiler, json_schema=schema)
    assert message.startswith("json_schema ")
    assert reason in message
    assert len(message) < 500


HARMLESS: dict[str, dict[str, Any]] = {
    "many a": {"regex": "(a|aa)*b{1,50000}"},
    "a in 300 places": {"regex": "(.*a){300}"},
    "nested plus": {"regex": "(x+x+)+y"},
    "nested star": {"regex": "((((((a*)*)*)*)*)*)*"},
    "long memory": {"regex": "(a|b)*a(a|b){25}"},
    "letters of the world": {"regex": r"(\p{L}{1,500} ){1,500}"},
    "long and empty": {"regex": "(.?){5000}"},
    "2,000 words": {"regex": "|".join(f"w{i:05d}" for i in range(2000))},
    "16,000 letters": {"regex": "a" * 16_000},
    "optional letters": {"regex": "(a?)" * 4000},
    "true": {"json_schema": "true"},
    "anything": {"json_schema": {}},
    "100 levels": {"json_schema": nested(60)},
    "300 properties": {"json_schema": properties(300, additionalProperties=False)},
    "1,000 required properties": {"json_schema": properties(1000, required=[f"p{i}" for i in range(1000)])},
    "enum of 2,000 strings": {"json_schema": {"enum": [f"value number {i}" for i in range(2000)]}},
    "a million characters": {"json_schema": {"type": "string", "minLength": 10**5, "maxLength": 10**6}},
    "long constant": {"json_schema": {"const": "x" * 60_000} | COMPACT},
    "1,000 definitions": {"json_schema": chain(1000, lambda ref: {"properties": {"a": ref}})},
    "50 times 3 levels": {"json_schema": chain(50, lambda ref: {"items": {"items": {"items": ref}}})},
    "a tree": {"json_schema": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}},
    "prices": {"json_schema": {"type": "array", "items": {"type": "number", "minimum": 0, "multipleOf": 0.01}}},
    "100 patternProperties": {"json_schema": {"type": "object", "patternProperties": {f"^k{i}$": {} for i in range(100)}}},
    "100 patterns apart": {"json_schema": {"properties": {f"k{i}": {"pattern": f"^a{i}+b$"} for i in range(100)}}},
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_grammar_that_looks_dangerous_is_followed_without_delay(compiler, name):
    began = time.process_time()
    grammar = compiler.compile(SamplingParams(**HARMLESS[name]))
    assert time.process_time() - began < 10
    rng = random.Random(1)
    slowest = 0.0
    for _ in range(10):
        began = time.process_time()
        _, masks = grammar.plan((), 5)
        slowest = max(slowest, time.process_time() - began)
        assert grammar.error is None
        token = rng.choice(sorted(ids(masks[0])))
        if token == EOS:
            break
        grammar.accept([token])
    assert slowest < 10


def test_a_bad_grammar_is_refused_before_anything_runs(llms):
    llm = llms(5)
    for bad in ({"regex": "("}, {"json_schema": {"type": "nope"}}):
        with pytest.raises(UserError, match=next(iter(bad))):
            llm.generate(["fine", "bad"], [FREE[0], SamplingParams(**bad)])
        with pytest.raises(UserError, match=next(iter(bad))):
            llm.stream("bad", SamplingParams(**bad))
        assert_empty(llm.engine)


def test_a_model_without_an_end_of_text_refuses_grammars(tmp_path):
    decoder = Decoder(random_weights(seed=1, dtype=jnp.float32), replace(TINY, eos_token_ids=()))
    llm = LLM(str(write_model_folder(tmp_path, decoder)), max_num_seqs=1)
    for grammar in ({"regex": "a"}, {"json_schema": {}}):
        with pytest.raises(UserError, match="need a model with an end-of-text token"):
            llm.generate("x", SamplingParams(**grammar))


@pytest.mark.parametrize(("vocab_size", "eos"), [(200, 2), (259, 300)])
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(vocab_size, eos):
    with pytest.raises(UserError, match="do not work with this model's tokenizer"):
        GrammarCompiler(TOKENIZER, vocab_size, (eos,))


def test_a_tokenizer_without_bytes_is_refused():
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    with pytest.raises(UserError, match="do not work with this model's tokenizer"):
        GrammarCompiler(Tokenizer(backend), 3, (2,))


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_fills_a_schema_sensibly_and_with_drafts_in_fewer_passes():
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": person, "minItems": 3, "maxItems": 3} | COMPACT
    ask = [
        {"role": "user", "content": "Give the names and ages of Anna, who is 31, Bob, who is 45, and Carl, who is 12."}
    ]
    params = SamplingParams(json_schema=schema, max_tokens=80)
    plain, drafted = (
        LLM("smollm2-135m", dtype="float32", num_draft_tokens=k, max_num_seqs=1, max_model_len=512).generate(
            ask, params
        )[0]
        for k in (0, 5)
    )
    assert drafted.token_ids == plain.token_ids
    assert {one["name"] for one in json.loads(plain.text)} == {"Anna", "Bob", "Carl"}
    assert drafted.stats.acceptance_length > 1.5
