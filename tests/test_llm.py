"""The Python API on a tiny model: prompts of every kind, streaming, stop strings, and clear errors."""

import dataclasses
import itertools

import numpy as np
import pytest

from spec_jax import LLM, RequestOutput, SamplingParams, UserError

FREE = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(str(tiny_folder), dtype="float32", max_num_seqs=2, num_draft_tokens=3, rounds_per_burst=4)


def test_a_prompt_is_a_string_or_ids_or_messages(llm):
    text = "hello"
    ids = llm.tokenizer.encode(text)
    by_text, by_ids = llm.generate([text, ids], FREE)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.prompt_token_ids == tuple(ids)
    [chat] = llm.generate([{"role": "user", "content": text}], FREE)
    assert len(chat.prompt_token_ids) > len(ids)
    assert len(chat.token_ids) == 40


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_parameters(llm):
    prompts = ["a", "bb", "ccc", "dddd", "eeeee"]
    each = [SamplingParams(max_tokens=i + 1, ignore_eos=True) for i in range(5)]
    outputs = llm.generate(prompts, each)
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [llm.tokenizer.decode(output.prompt_token_ids) for output in outputs] == prompts


def test_a_stream_grows_into_what_generate_returns(llm):
    [whole] = llm.generate("hello", FREE)
    grown = list(llm.stream("hello", FREE))
    assert grown[-1].token_ids == whole.token_ids
    assert grown[-1].text == whole.text
    assert [o.finish_reason for o in grown] == [None] * (len(grown) - 1) + ["length"]
    for early, late in itertools.pairwise(grown):
        assert late.text.startswith(early.text)
        assert len(late.token_ids) >= len(early.token_ids)


def test_a_stream_that_is_closed_early_frees_its_slot(llm):
    for _ in range(5):
        stream = llm.stream("hello", FREE)
        next(stream)
        stream.close()
    assert not llm.engine.scheduler.has_work


def text_with_stops(model: LLM) -> tuple[dict, RequestOutput, list[str]]:
    """A text of the random model with plain pieces of three characters to stop at, in order, and how to get it again."""
    for seed in range(300):
        options = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": seed}
        [free] = model.generate("hello", SamplingParams(**options))
        pieces = [(i, free.text[i : i + 3]) for i in range(4, len(free.text) - 3)]
        stops = [s for i, s in pieces if s.isascii() and s.isprintable() and free.text.find(s) == i]
        if len(stops) >= 2:
            return options, free, stops
    raise AssertionError("no text of the random model has two such pieces")


@pytest.mark.parametrize("k", [0, 3])
def test_a_stop_string_cuts_the_text_exactly_and_never_shows_a_part_of_itself(tiny_folder, llm, k):
    model = llm if k else LLM(str(tiny_folder), dtype="float32", draft="none", max_num_seqs=1)
    options, free, [stop, *_] = text_with_stops(model)
    at = free.text.find(stop)
    pieces = [output.text for output in model.stream("hello", SamplingParams(**options, stop=stop))]
    [output] = model.generate("hello", SamplingParams(**options, stop=["never there", stop]))
    assert output.text == pieces[-1] == free.text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert all(free.text[:at].startswith(piece) for piece in pieces)
    shortest = model.tokenizer.decode(output.token_ids[:-1])
    assert stop not in shortest  # it ended with the token that completed the stop string


def test_the_earliest_stop_string_wins(llm):
    options, free, stops = text_with_stops(llm)
    [output] = llm.generate("hello", SamplingParams(**options, stop=[stops[-1], stops[0]]))
    assert output.text == free.text[: free.text.find(stops[0])]


def test_the_same_seed_gives_the_same_text_and_no_seed_a_new_one(llm):
    seeded = SamplingParams(max_tokens=30, temperature=1.5, ignore_eos=True, seed=2**63 + 11)
    a, b = llm.generate(["hi", "hi"], seeded)
    assert a.token_ids == b.token_ids
    c, d = llm.generate(["hi", "hi"], SamplingParams(max_tokens=30, temperature=1.5, ignore_eos=True))
    assert c.token_ids != d.token_ids


@pytest.mark.parametrize("prompt", ["x", "aaaaaaaaaaaaaaaa", "🎉👩‍👩‍👧", "日本語テキスト", "<|im_end|>", "\n", " "])
def test_odd_prompts_are_answered(llm, prompt):
    [output] = llm.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == 5
    assert llm.tokenizer.decode(output.prompt_token_ids) == prompt


def test_a_context_fills_up_to_the_model_length_exactly(tiny_folder):
    model = LLM(str(tiny_folder), dtype="float32", max_model_len=32, max_num_seqs=1)
    [output] = model.generate(list(range(10, 41)), SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"
    with pytest.raises(UserError, match="the prompt has 32 tokens, max_model_len is 32"):
        model.generate(list(range(10, 42)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[3, "x"]], "a prompt is a string, a list of token ids, or a list of chat messages"),
        ([[3, 259]], "token id 259: the vocabulary has ids 0 to 258"),
        ([[-1]], "token id -1"),
        ("x" * 300, "the prompt has 300 tokens, max_model_len is 256"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_and_leave_nothing_behind(llm, prompt, message):
    with pytest.raises(UserError, match=message):
        llm.generate(prompt if prompt != [] else [[]])
    assert not llm.engine.scheduler.has_work
    assert llm.generate("ok", SamplingParams(max_tokens=2))


def test_one_bad_prompt_among_many_stops_the_call_but_not_the_engine(llm):
    with pytest.raises(UserError, match="token id 999"):
        llm.generate(["fine", [999]], FREE)
    assert not llm.engine.scheduler.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "magic"}, "draft 'magic' is unknown: allowed are auto, ngram, eagle, none"),
        ({"num_draft_tokens": 17}, "num_draft_tokens is 17: allowed are 0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown: allowed are bfloat16, float32"),
        ({"max_model_len": 1000}, "max_model_len is 1000: this model was trained for at most 256"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"rounds_per_burst": 0}, "rounds_per_burst is 0: allowed is an integer >= 1"),
    ],
)
def test_options_out_of_range_are_named_with_their_limits(tiny_folder, options, message):
    with pytest.raises(UserError, match=message):
        LLM(str(tiny_folder), **options)


def test_as_many_parameters_as_prompts(llm):
    with pytest.raises(UserError, match="2 prompts came with 3 SamplingParams"):
        llm.generate(["a", "b"], [FREE] * 3)


def test_bfloat16_differs_from_plain_decoding_only_at_near_ties(tiny_folder):
    plain, drafted = (LLM(str(tiny_folder), draft=d, max_num_seqs=1) for d in ("none", "ngram"))
    prompts = ["hello", "abcabcabc", "zz"]
    pairs = zip(plain.generate(prompts, FREE), drafted.generate(prompts, FREE), strict=True)
    assert sum(a.token_ids[:8] == b.token_ids[:8] for a, b in pairs) >= 2


def test_two_streams_and_a_call_between_them_all_get_their_whole_text(llm):
    expected = [llm.generate(prompt, FREE)[0] for prompt in ("hello", "abab")]
    first, second = llm.stream("hello", FREE), llm.stream("abab", FREE)
    next(first)
    llm.generate("in between", FREE)
    together = list(itertools.zip_longest(first, second))
    for place, whole in enumerate(expected):
        last = [outputs[place] for outputs in together if outputs[place] is not None][-1]
        assert last.token_ids == whole.token_ids
        assert last.finish_reason == "length"


def test_a_stream_that_is_never_read_holds_nothing(llm):
    stream = llm.stream("hello", FREE)
    assert not llm.engine.scheduler.has_work
    del stream
    assert len(llm.generate("ok", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_a_stream_refuses_a_bad_prompt_at_once(llm):
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.stream("")


@pytest.mark.parametrize("prompts", [{"role": "user", "content": "x"}, b"abc", 7, None])
def test_what_is_no_prompt_is_refused_with_its_type(llm, prompts):
    with pytest.raises(UserError, match=f"not {type(prompts).__name__}"):
        llm.generate(prompts)


def test_prompts_may_come_from_a_generator_and_ids_from_numpy(llm):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    assert len(llm.generate((p for p in ("a", "b")), params)) == 2
    [by_array] = llm.generate(np.array([70, 71]), params)
    [by_list] = llm.generate([70, 71], params)
    assert by_array.token_ids == by_list.token_ids


def test_text_that_is_no_utf8_is_refused(llm):
    with pytest.raises(UserError, match="no UTF-8"):
        llm.generate("a\udcff")


def test_a_huge_top_k_keeps_everything(llm):
    wide, off = (SamplingParams(max_tokens=9, temperature=1.0, seed=1, top_k=k) for k in (2**31 - 1, 0))
    assert llm.generate("x", wide)[0].token_ids == llm.generate("x", off)[0].token_ids


def test_an_interrupted_call_leaves_the_engine_usable(llm, monkeypatch):
    [expected] = llm.generate("hello", FREE)
    stream = llm.stream("hello", FREE)
    next(stream)

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_jax.engine._to_host", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abab", FREE)
    assert list(stream)[-1].finish_reason == "abort"
    assert llm.generate("hello", FREE)[0].token_ids == expected.token_ids
    assert not llm.engine.scheduler.running


def test_a_stop_id_that_is_also_the_end_of_text_is_reported_when_the_user_asked_for_it(tiny_folder, llm):
    [free] = llm.generate("hello", FREE)
    stop = free.token_ids[3]
    [output] = llm.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[stop]))
    assert output.stop_reason == stop


def test_n_completions_are_those_of_the_seeds_that_follow_each_other(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
    [together] = llm.generate("hello", dataclasses.replace(params, n=3, prompt_logprobs=1))
    alone = [llm.generate("hello", dataclasses.replace(params, seed=5 + i))[0] for i in range(3)]
    assert [output.index for output in together.outputs] == [0, 1, 2]
    assert [output.token_ids for output in together.outputs] == [output.token_ids for output in alone]
    assert len(together.prompt_logprobs) == len(together.prompt_token_ids)
    assert together.finished
    *_, streamed = llm.stream("hello", dataclasses.replace(params, n=3))
    assert [output.text for output in streamed.outputs] == [output.text for output in together.outputs]


def test_the_largest_seed_goes_around(llm):
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=2**64 - 1, n=2)
    [both] = llm.generate("hello", params)
    [zero] = llm.generate("hello", dataclasses.replace(params, seed=0, n=1))
    assert both.outputs[1].token_ids == zero.token_ids


@pytest.mark.parametrize("k", [0, 3])
def test_an_included_stop_string_is_the_end_of_the_text(tiny_folder, llm, k):
    model = llm if k else llm.with_draft("none")
    options, free, [stop, *_] = text_with_stops(model)
    params = SamplingParams(**options, stop=stop, include_stop_str_in_output=True)
    pieces = [output.text for output in model.stream("hello", params)]
    assert pieces[-1] == free.text[: free.text.find(stop) + len(stop)]
    assert all(pieces[-1].startswith(piece) for piece in pieces)


def test_min_tokens_holds_back_stop_strings_and_stop_ids(llm):
    options, free, [stop, later, *_] = text_with_stops(llm)
    [early] = llm.generate("hello", SamplingParams(**options, stop=[stop, later]))
    needed = len(early.token_ids)
    [held] = llm.generate("hello", SamplingParams(**options, stop=[stop, later], min_tokens=needed))
    # The first stop string ends exactly with the tokens that must be there.
    assert held.text == free.text[: free.text.find(later)]
    [ended] = llm.generate("hello", SamplingParams(**options, stop=stop, min_tokens=needed - 1))
    assert ended.text == early.text
    token = free.token_ids[3]
    [cut] = llm.generate("hello", SamplingParams(**options, stop_token_ids=[token], min_tokens=10))
    assert token not in cut.token_ids[:10]
    assert cut.token_ids[:3] == free.token_ids[:3]


def test_another_drafter_on_the_same_weights_gives_the_same_text(llm):
    other = llm.with_draft("none")
    [a], [b] = llm.generate("abab abab", FREE), other.generate("abab abab", FREE)
    assert a.token_ids == b.token_ids
    assert b.stats.drafted == 0 < a.stats.drafted


def test_a_bad_word_is_never_written(llm):
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.5, allowed_token_ids=[68, 69, 70], seed=1)
    text = llm.generate("x", params)[0].text
    word = text[5:8]
    [output] = llm.generate("x", dataclasses.replace(params, bad_words=[word], logprobs=0))
    assert word in text
    assert word not in output.text
    assert len(output.token_ids) == len(output.logprobs) == 60
