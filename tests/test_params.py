"""SamplingParams refuse what cannot be used: the error names the field, the value given, and what is allowed."""

import math
from dataclasses import fields

import numpy as np
import pytest

from spec_jax.errors import UserError
from spec_jax.params import SamplingParams
from spec_jax.request import Request
from tests.test_engine import TOKENIZER, make_engine

NAN, INF, HUGE = math.nan, math.inf, 10**400
NUMBERS = {  # field: what is allowed in words, values that are, values that are not
    "n": ("an integer in [1, 128]", [1], [0, -1, 129, HUGE]),
    "max_tokens": ("an integer in [1, 2**31)", [1, 2**31 - 1], [0, -5, 2**31, HUGE]),
    "min_tokens": ("an integer in [0, 2**31)", [0, 256], [-1, 2**31, -HUGE]),
    "temperature": ("0, or a number >= 1e-6", [0, -0.0, 1e-6, 2, 1e29], [-1, 9e-7, -1e-9, HUGE, 1e30, INF, -INF]),
    "top_k": ("an integer in [1, 2**31), or 0 or -1 for off", [-1, 0, 1, 2**31 - 1], [-2, 2**31, -HUGE]),
    "top_p": ("a number in (0, 1]", [1e-6, 1, 1.0], [0, -0.1, 1.0000001, HUGE, INF]),
    "min_p": ("a number in [0, 1]", [0, 1, 0.5], [-1e-9, 1.1, HUGE, -INF]),
    "typical_p": ("a number in (0, 1]", [1e-6, 1, 1.0], [0, -0.1, 1.0000001, HUGE, INF]),
    "seed": ("an integer in [0, 2**64)", [None, 0, 2**64 - 1], [-1, 2**64, HUGE]),
    "repetition_penalty": ("a number in [0.01, 100]", [0.01, 1, 100], [0, -1, 0.009, 100.1, HUGE, INF]),
    "presence_penalty": ("a number in [-2, 2]", [-2, 0, 2.0], [-2.01, 2.01, HUGE, INF, -INF]),
    "frequency_penalty": ("a number in [-2, 2]", [-2, 0, 2.0], [-2.01, 2.01, HUGE, INF, -INF]),
    "logprobs": ("an integer in [0, 20], or None", [None, 0, 20], [-1, 21, HUGE]),
    "prompt_logprobs": ("an integer in [0, 20], or None", [None, 0, 20], [-1, 21, HUGE]),
}
INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def refused(**params) -> str:
    with pytest.raises(UserError) as caught:
        SamplingParams(**params)
    return str(caught.value)


def shown(value: object) -> str:
    """A message stays one line, whatever was given."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def cases(of: dict, column: int) -> list:
    """Field, allowed, value, with ids that stay short."""
    return [
        pytest.param(field, row[0], value, id=f"{field}-{str(value)[:12]}")
        for field, row in of.items()
        for value in row[column]
    ]


@pytest.mark.parametrize(("field", "allowed", "value"), cases(NUMBERS, 1))
def test_the_ends_of_every_range_are_allowed(field, allowed, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "allowed", "value"), cases(NUMBERS, 2))
def test_numbers_out_of_range_are_refused_with_the_range(field, allowed, value):
    assert refused(**{field: value}) == f"{field} is {shown(value)}: allowed is {allowed}"


@pytest.mark.parametrize("value", [True, False, NAN, "1", "", [1], (), {}, 1j, b"1", object], ids=repr)
@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_no_number_is_refused(field, value):
    assert refused(**{field: value}) == f"{field} is {shown(value)}: allowed is {NUMBERS[field][0]}"


@pytest.mark.parametrize("value", [1.0, 0.5])
@pytest.mark.parametrize("field", INTEGERS)
def test_a_float_is_no_integer(field, value):
    assert refused(**{field: value}) == f"{field} is {shown(value)}: allowed is {NUMBERS[field][0]}"


@pytest.mark.parametrize(
    "field", [field for field in NUMBERS if SamplingParams.__dataclass_fields__[field].default is not None]
)
def test_numbers_that_have_a_default_cannot_be_none(field):
    assert refused(**{field: None}).startswith(f"{field} is None: allowed is ")


@pytest.mark.parametrize("value", [0, 1, None, "true", 1.0], ids=repr)
@pytest.mark.parametrize("field", FLAGS)
def test_a_flag_is_true_or_false_and_nothing_like_it(field, value):
    assert refused(**{field: value}) == f"{field} is {shown(value)}: allowed is True or False"


LISTS = {  # field: values, and what the error says of them
    "stop": [
        (5, "stop is 5: allowed is a list"),
        (b"x", "stop is b'x': allowed is a list"),
        ({"a": 1}, "stop is {'a': 1}: allowed is a list"),
        ("", "stop is '': allowed is non-empty strings"),
        (["a", ""], "stop is '': allowed is non-empty strings"),
        (["a", 5], "stop is 5: allowed is non-empty strings"),
        (["a", None], "stop is None: allowed is non-empty strings"),
        (["x" * 10_000], f"stop is '{'x' * 79}…: allowed is strings of up to 1024 characters"),
        ("x" * 1025, f"stop is '{'x' * 79}…: allowed is strings of up to 1024 characters"),
        (["x"] * 65, "stop is a list of 65: allowed are up to 64 strings"),
        (["x"] * 10_000, "stop is a list of 10000: allowed are up to 64 strings"),
    ],
    "stop_token_ids": [
        (5, "stop_token_ids is 5: allowed is a list"),
        ("12", "stop_token_ids is '12': allowed is a list"),
        ([1, -1], "stop_token_ids is -1: allowed is token ids in [0, 2**31)"),
        ([True], "stop_token_ids is True: allowed is token ids in [0, 2**31)"),
        ([1.0], "stop_token_ids is 1.0: allowed is token ids in [0, 2**31)"),
        (["1"], "stop_token_ids is '1': allowed is token ids in [0, 2**31)"),
        ([NAN], "stop_token_ids is nan: allowed is token ids in [0, 2**31)"),
    ],
    "allowed_token_ids": [
        ([], "allowed_token_ids is (): allowed is at least one token id, or None"),
        (5, "allowed_token_ids is 5: allowed is a list"),
        ("12", "allowed_token_ids is '12': allowed is a list"),
        ([-1], "allowed_token_ids is -1: allowed is token ids in [0, 2**31)"),
        ([False], "allowed_token_ids is False: allowed is token ids in [0, 2**31)"),
        ([[1]], "allowed_token_ids is [1]: allowed is token ids in [0, 2**31)"),
    ],
    "bad_words": [
        ("word", "bad_words is 'word': allowed is a list"),
        ([5], "bad_words is 5: allowed is a list"),
        ([b"x"], "bad_words is b'x': allowed is a list"),
        ([[1], []], "bad_words is (): allowed is words, or sequences of at least one token id"),
        ([[1, -1]], "bad_words is -1: allowed is token ids in [0, 2**31)"),
        ([[True]], "bad_words is True: allowed is token ids in [0, 2**31)"),
        ([[[1]]], "bad_words is [1]: allowed is token ids in [0, 2**31)"),
        ([["x"]], "bad_words is 'x': allowed is token ids in [0, 2**31)"),
        (["ok", ""], "bad_words is '': allowed is words that are not blank"),
        ([" \n\t"], r"bad_words is ' \n\t': allowed is words that are not blank"),
    ],
    "logit_bias": [
        (5, "logit_bias is 5: allowed is a dict from token id to number"),
        ([(5, 1.0)], "logit_bias is [(5, 1.0)]: allowed is a dict from token id to number"),
        ({-1: 1.0}, "logit_bias is -1: allowed is token ids in [0, 2**31)"),
        ({"5": 1.0}, "logit_bias is '5': allowed is token ids in [0, 2**31)"),
        ({True: 1.0}, "logit_bias is True: allowed is token ids in [0, 2**31)"),
        ({1.0: 1.0}, "logit_bias is 1.0: allowed is token ids in [0, 2**31)"),
        ({5: 100.1}, "logit_bias is 100.1: allowed is numbers in [-100, 100]"),
        ({5: -101}, "logit_bias is -101: allowed is numbers in [-100, 100]"),
        ({5: NAN}, "logit_bias is nan: allowed is numbers in [-100, 100]"),
        ({5: -INF}, "logit_bias is -inf: allowed is numbers in [-100, 100]"),
        ({5: HUGE}, f"logit_bias is {shown(HUGE)}: allowed is numbers in [-100, 100]"),
        ({5: "1"}, "logit_bias is '1': allowed is numbers in [-100, 100]"),
        ({5: True}, "logit_bias is True: allowed is numbers in [-100, 100]"),
        ({5: None}, "logit_bias is None: allowed is numbers in [-100, 100]"),
    ],
    "regex": [
        ("", "regex is '': allowed is a regex"),
        (5, "regex is 5: allowed is a regex"),
        (b"a", "regex is b'a': allowed is a regex"),
    ],
    "json_schema": [
        (5, "json_schema is 5: allowed is a JSON schema: a dict, or its JSON text"),
        ([], "json_schema is []: allowed is a JSON schema: a dict, or its JSON text"),
        (b"{}", "json_schema is b'{}': allowed is a JSON schema: a dict, or its JSON text"),
        ("5", "json_schema is '5': allowed is a JSON schema: a dict, or its JSON text"),
        ("[]", "json_schema is '[]': allowed is a JSON schema: a dict, or its JSON text"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [pytest.param(f, v, m, id=f"{f}-{str(v)[:20]!r}") for f, rows in LISTS.items() for v, m in rows],
)
def test_lists_and_texts_are_checked_to_their_last_element(field, value, message):
    assert refused(**{field: value}) == message


@pytest.mark.parametrize(
    "schema", ["", "{", "{'a': 1}", "[" * 100_000, '{"const": ' + "1" * 5000 + "}"], ids=lambda s: s[:10]
)
def test_text_that_is_no_json_is_refused(schema):
    assert refused(json_schema=schema).startswith("json_schema is no JSON: ")


def deep() -> dict:
    schema: dict = {}
    for _ in range(100_000):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize("make", [lambda: {"a": {1}}, lambda: {"a": b"x"}, lambda: {"const": 10**5000}, deep])
def test_a_schema_that_json_cannot_hold_is_refused(make):
    assert refused(json_schema=make()).startswith("json_schema cannot be written as JSON: ")


def test_every_field_is_checked_here():
    assert {field.name for field in fields(SamplingParams)} == {*NUMBERS, *FLAGS, *LISTS}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 300}, "min_tokens is 300, more than max_tokens 256"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens 8"),
        ({"n": 2}, "n is 2 with temperature 0: greedy completions are all the same"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex: give one of the two"),
        *[
            ({grammar: source, field: value}, f"{field} cannot be combined with {grammar}")
            for grammar, source in (("json_schema", {}), ("json_schema", "true"), ("regex", "a+"))
            for field, value in (
                ("min_tokens", 1), ("ignore_eos", True), ("allowed_token_ids", [5]), ("bad_words", ["x"]),
            )
        ],
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:45],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(params, message):
    assert refused(**params).startswith(message)


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 8, "max_tokens": 8},
        {"n": 128, "temperature": 1e-6},
        {"json_schema": {}, "min_tokens": 0, "bad_words": [], "stop": ["x"], "logit_bias": {5: 1}, "logprobs": 2},
        {"regex": "a", "json_schema": None, "ignore_eos": False, "allowed_token_ids": None},
        {"stop": ["x" * 1024] * 64, "stop_token_ids": [], "logit_bias": {}},
        {"stop": [" ", "\n"], "bad_words": ["\u200b", [0], (1, 2)]},
    ],
)
def test_what_only_looks_like_a_contradiction_is_allowed(params):
    SamplingParams(**params)


def test_changing_the_callers_lists_and_dicts_changes_no_request():
    lists = {
        "stop": ["a"], "stop_token_ids": [5], "allowed_token_ids": [6, 7], "bad_words": ["w", [8, 9]],
        "logit_bias": {10: 1.0}, "json_schema": None,
    }  # fmt: skip
    params = SamplingParams(**lists)
    lists["bad_words"][1].append(99)
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        lists[name].append(99)
    lists["logit_bias"][99] = 1.0
    assert params == SamplingParams(
        stop="a", stop_token_ids=(5,), allowed_token_ids=(6, 7), bad_words=("w", (8, 9)), logit_bias={10: 1.0}
    )
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    constrained = SamplingParams(json_schema=schema)
    schema["properties"]["a"]["type"] = "integer"
    assert constrained.json_schema == '{"type": "object", "properties": {"a": {"type": "string"}}}'


def test_none_is_an_empty_list():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())


def test_numbers_of_numpy_become_pythons():
    ids = np.array([5, 6], np.int64)
    params = SamplingParams(
        max_tokens=np.int32(7), temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=ids, bad_words=[ids]
    )
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
    assert params.bad_words == ((5, 6),)
    assert {type(x) for x in (params.max_tokens, params.top_k, *params.stop_token_ids)} == {int}


def test_numbers_that_python_does_not_write_out_are_refused_all_the_same():
    assert refused(max_tokens=10**5000).startswith("max_tokens is a number of thousands of digits: allowed is")
    assert refused(stop_token_ids=[10**5000]).startswith("stop_token_ids is a number of thousands")


def test_lists_may_be_any_iterable():
    params = SamplingParams(stop=iter(["a", "b"]), stop_token_ids=range(3), allowed_token_ids={4}, bad_words=([5],))
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (0, 1, 2))
    assert (params.allowed_token_ids, params.bad_words) == ((4,), ((5,),))


# --- what only an engine can tell -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_decoder):
    return make_engine(tiny_decoder, slots=1)


def checked(engine, bad_words=(), eos=(2,), **params) -> None:
    sampling = SamplingParams(**{"max_tokens": 24, "bad_words": bad_words, **params})
    request = Request(
        prompt=[5, 6], params=sampling, tokenizer=TOKENIZER, eos_token_ids=eos, max_length=26, seed=0,
        bad_words=sampling.bad_words,
    )  # fmt: skip
    engine.check(request)


@pytest.mark.parametrize("token", [259, 2**31 - 1])
@pytest.mark.parametrize(
    ("field", "holding"),
    [
        ("stop_token_ids", lambda token: [3, token]),
        ("logit_bias", lambda token: {3: 1.0, token: 1.0}),
        ("allowed_token_ids", lambda token: [3, token]),
        ("bad_words", lambda token: [[3], [4, token]]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_with_their_field(engine, field, holding, token):
    checked(engine, **{field: holding(258)})
    with pytest.raises(UserError, match=f"^{field} has token id {token}: the vocabulary has ids 0 to 258$"):
        checked(engine, **{field: holding(token)})


@pytest.mark.parametrize(
    ("allowed", "bad_words"),
    [([9], [[9]]), ([9, 10], [[9], [10]]), ([9, 10], [[9, 10], [9, 9]]), (None, [[token] for token in range(259)])],
)
def test_bad_words_that_leave_nothing_of_the_allowed_ids_are_refused(engine, allowed, bad_words):
    with pytest.raises(UserError, match="bad_words can forbid every token"):
        checked(engine, bad_words, allowed_token_ids=allowed)
    checked(engine, [*bad_words[:-1], [11]], allowed_token_ids=allowed)


@pytest.mark.parametrize(
    ("bad_words", "params"),
    [
        ([], {"allowed_token_ids": [2]}),
        ([], {"allowed_token_ids": [2, 7], "stop_token_ids": [7]}),
        ([], {"allowed_token_ids": [7], "stop_token_ids": [7], "ignore_eos": True}),
        ([[8]], {"allowed_token_ids": [2, 8]}),
    ],
)
def test_min_tokens_with_nothing_but_stop_ids_allowed_is_refused(engine, bad_words, params):
    with pytest.raises(UserError, match="min_tokens forbids the stop ids at first"):
        checked(engine, bad_words, min_tokens=1, **params)
    checked(engine, bad_words, min_tokens=0, **params)
    checked(engine, bad_words, min_tokens=1, **{**params, "allowed_token_ids": [2, 7, 9]})


def test_an_ignored_end_of_text_id_is_no_stop_id_for_min_tokens(engine):
    checked(engine, allowed_token_ids=[2], min_tokens=1, ignore_eos=True)


def test_too_many_bad_words_are_refused_with_the_limit_which_single_tokens_do_not_count_towards(engine):
    words = [[token, token + 1] for token in range(64)]
    checked(engine, [*words, *([token] for token in range(100, 200))])
    with pytest.raises(UserError, match="bad_words are 65 sequences of several tokens: at most 64 are possible"):
        checked(engine, [*words, [100, 101]])


def test_a_bad_word_of_too_many_tokens_is_refused_with_the_limit(engine):
    checked(engine, [list(range(8))])
    with pytest.raises(UserError, match="bad_words has a word of 9 tokens: at most 8 are possible"):
        checked(engine, [list(range(9))])


def test_stop_ids_count_the_models_own_unless_they_are_ignored(engine):
    ids = list(range(3, 19))
    checked(engine, stop_token_ids=[*ids[:15], 2, 3], eos=(2,))
    checked(engine, stop_token_ids=ids, ignore_eos=True)
    with pytest.raises(UserError, match=r"17 stop token ids \(the model's own included\): at most 16 are possible"):
        checked(engine, stop_token_ids=ids)
