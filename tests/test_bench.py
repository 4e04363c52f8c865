"""The bench asks every question with every drafter and writes what it found."""

import json

import pytest

from spec_jax import SamplingParams, UserError
from spec_jax.bench import read_questions, run_bench


def question(number: int, category: str, text: str = "abcabc") -> str:
    return json.dumps({"question_id": number, "category": category, "turns": [text, "more?"]})


def test_results_of_two_drafters_stand_side_by_side(tiny_folder, tmp_path):
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("\n".join([question(1, "qa"), question(2, "qa", "zz"), question(3, "rag", "abab" * 20), ""]))
    run_bench(
        dataset=dataset,
        drafts=["ngram", "none"],
        model_options={"model": str(tiny_folder), "dtype": "float32", "num_draft_tokens": 3},
        params=SamplingParams(max_tokens=30, ignore_eos=True),
        per_category=None,
        output=tmp_path / "out",
    )
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {(row["category"], row["draft"]): row for row in result["rows"]}
    assert set(rows) == {(c, d) for c in ("qa", "rag", "all") for d in ("ngram", "none")}
    assert result["num_same_tokens"] == result["num_questions"] == 3
    assert rows["all", "none"]["acceptance_length"] == 1
    assert rows["all", "ngram"]["acceptance_length"] > 1
    assert rows["all", "ngram"]["num_tokens"] == rows["all", "none"]["num_tokens"] == 90
    assert all(row["tpot_ms"] > 0 and row["ttft_ms"] > 0 for row in rows.values())
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_per_category_keeps_the_first_of_each(tmp_path):
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("\n".join(question(i, "ab"[i % 2]) for i in range(10)))
    assert [q.question_id for q in read_questions(dataset, per_category=2)] == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ("not json", "line 1 is no question"),
        ('{"question_id": 1}', "line 1 is no question"),
        ('{"question_id": 1, "category": "a", "turns": []}', "line 1 is no question"),
        ('{"question_id": 1, "category": "a", "turns": "hello"}', "line 1 is no question"),
        ('{"question_id": 1, "category": ["a"], "turns": ["hello"]}', "line 1 is no question"),
    ],
)
def test_a_file_that_is_no_dataset_is_named_with_the_line(tmp_path, content, message):
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text(content)
    with pytest.raises(UserError, match=message):
        read_questions(dataset)


def test_two_equal_drafters_are_refused(tmp_path):
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text(question(1, "qa"))
    with pytest.raises(UserError, match="give different drafters"):
        run_bench(
            dataset=dataset, drafts=["none", "none"], model_options={}, params=SamplingParams(), per_category=None,
            output=tmp_path,
        )  # fmt: skip


def test_a_missing_dataset_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read dataset"):
        read_questions(tmp_path / "none.jsonl")
