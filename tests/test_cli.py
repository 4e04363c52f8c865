"""The command line on a tiny model: text as it comes, one JSON object, one line for a mistake."""

import io
import json
import subprocess
import sys

import pytest

from spec_jax import __version__
from spec_jax.cli import main


@pytest.fixture
def run(capfd, tiny_folder):
    """Runs `spec-jax ...` in this process on the tiny model; gives exit code, standard output and standard error."""

    def call(*arguments: str, model: str | None = None) -> tuple[int, str, str]:
        options = [] if arguments[0] in ("fetch",) else ["--model", model or str(tiny_folder), "--dtype", "float32"]
        code = 0
        try:
            main([*arguments, *options])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_generate_prints_the_text_and_a_line_of_figures(run):
    code, out, err = run("generate", "--prompt", "hello", "--max-tokens", "12", "--ignore-eos")
    assert code == 0
    assert out.endswith("\n")
    assert "12 tokens in" in err
    assert "per pass" in err


def test_json_is_one_object_with_the_documented_fields(run):
    code, out, err = run("generate", "--prompt", "hello", "--max-tokens", "12", "--ignore-eos", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer) >= {"text", "token_ids", "finish_reason", "stats"}
    assert set(answer["stats"]) >= {
        "rounds", "drafted", "accepted", "accepted_per_position", "acceptance_length", "ttft_s", "tokens_per_s",
    }  # fmt: skip
    assert len(answer["token_ids"]) == 12


def test_every_sampling_parameter_is_an_option(run):
    code, out, err = run(
        "generate", "--prompt", "hello", "--json", "--max-tokens", "20", "--min-tokens", "5", "--ignore-eos",
        "--temperature", "0.9", "--seed", "3", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--typical-p", "0.9",
        "--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.1", "--logit-bias", "70", "9",
        "--allowed-token-ids", "70", "71", "72", "--bad-words", "x", "yz", "--stop", "never", "--stop-token-ids", "5",
        "--logprobs", "2",
    )  # fmt: skip
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer["token_ids"]) <= {70, 71, 72}
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 20


def test_a_schema_may_stand_in_a_file(run, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"enum": ["red", "green"]}')
    _, out, _ = run("generate", "--prompt", "colour", "--json-schema", str(path), "--json")
    assert json.loads(json.loads(out)["text"]) in ("red", "green")


def test_the_text_is_the_same_with_and_without_drafts(run):
    arguments = ("generate", "--prompt", "abab", "--max-tokens", "30", "--json", "--temperature", "0.9", "--seed", "5")
    texts = [json.loads(run(*arguments, "--draft", draft)[1])["token_ids"] for draft in ("none", "ngram", "auto")]
    assert texts[0] == texts[1] == texts[2]


def test_the_prompt_may_come_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    _, piped, _ = run("generate", "--prompt", "-", "--max-tokens", "8", "--json")
    _, typed, _ = run("generate", "--prompt", "hello", "--max-tokens", "8", "--json")
    assert json.loads(piped)["token_ids"] == json.loads(typed)["token_ids"]


def test_a_system_message_means_chat(run):
    _, out, _ = run("generate", "--prompt", "x", "--system", "y", "--max-tokens", "4", "--json")
    assert json.loads(out)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "magic"], "draft 'magic' is unknown: allowed are auto, ngram, eagle, none"),
        (["--max-tokens", "0"], "max_tokens is 0: allowed is an integer in [1, 2**31)"),
        (["--temperature", "-1"], "temperature is -1.0: allowed is 0, or a number >= 1e-6"),
        (["--top-p", "0"], "top_p is 0.0: allowed is a number in (0, 1]"),
        (["--min-p", "2"], "min_p is 2.0: allowed is a number in [0, 1]"),
        (["--top-k", "-5"], "top_k is -5: allowed is an integer in [1, 2**31), or 0 or -1 for off"),
        (["--seed", "-1"], "seed is -1: allowed is an integer in [0, 2**64)"),
        (["--stop", ""], "stop is '': allowed is non-empty strings"),
        (["--min-tokens", "300"], "min_tokens is 300, more than max_tokens 256"),
        (["--logit-bias", "999", "1.0"], "logit_bias has token id 999: the vocabulary has ids 0 to 258"),
        (["--logprobs", "21"], "logprobs is 21: allowed is an integer in [0, 20], or None"),
        (["--regex", "("], "regex cannot be used: "),
        (["--json-schema", '{"not": {}}'], "json_schema cannot be used: "),
        (["--json-schema", "no-such-file.json"], "json_schema is 'no-such-file.json': neither JSON nor a file"),
        (["--num-draft-tokens", "17"], "num_draft_tokens is 17: allowed are 0"),
        (["--max-model-len", "100000"], "max_model_len is 100000: this model was trained for at most 256"),
    ],
)
def test_a_value_out_of_range_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run("generate", "--prompt", "x", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"spec-jax: {message}")
    assert err.count("\n") == 1


def test_an_empty_prompt_is_one_line_and_exit_code_2(run):
    assert run("generate", "--prompt", "")[::2] == (2, "spec-jax: the prompt is empty: at least one token is needed\n")


@pytest.mark.parametrize("model", ["no-such-model", "./nowhere/model.gguf", "some/where/else"])
def test_a_model_that_is_not_there_lists_what_could_be(run, model):
    code, out, err = run("generate", "--prompt", "x", model=model)
    assert (code, out) == (2, "")
    assert "smollm2-135m" in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line(run, tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("not a model, but long enough to be looked at twice")
    code, _, err = run("generate", "--prompt", "x", model=str(path))
    assert code == 2
    assert "is not a GGUF file" in err


def test_fetch_of_an_unknown_name_lists_the_known_ones(run):
    code, _, err = run("fetch", "nonsense")
    assert code == 2
    assert "smollm2-135m" in err


def test_a_reader_that_goes_away_ends_the_program_quietly(tiny_folder):
    command = [
        sys.executable, "-m", "spec_jax", "generate", "--model", str(tiny_folder), "--prompt", "x",
        "--max-tokens", "200", "--ignore-eos",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert "Traceback" not in error
    assert process.returncode == 141


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"spec-jax {__version__}\n"
