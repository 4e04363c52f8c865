"""The README's commands run as they are written, and its Python example too."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.removeprefix("$ ")
    for kind, text in BLOCKS
    if kind == "console"
    for line in text.replace("\\\n", "").splitlines()
    if line.startswith("$ spec-jax ")
]
EXAMPLES = [text for kind, text in BLOCKS if kind == "python"]
[SCHEMA] = [text for kind, text in BLOCKS if kind == "json"]


def test_the_readme_shows_both_ways_of_use():
    assert COMMANDS
    assert EXAMPLES


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=pytest.mark.slow)
        if c.startswith(("spec-jax verify", "spec-jax compile-check", "spec-jax bench"))
        else c
        for c in COMMANDS
    ],
)
def test_a_command_runs_and_prints_what_the_readme_shows(command, tmp_path):
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text('{"question_id": 1, "category": "qa", "turns": ["Say hello."]}\n')
    (tmp_path / "person.json").write_text(SCHEMA)
    arguments = shlex.split(command.replace("spec_bench.jsonl", str(dataset)))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "spec_jax", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if arguments[0] == "generate":
        beginning = done.stdout[:60]  # further on, bfloat16 may part ways at a near-tie on another processor
        assert len(beginning) == 60
        assert beginning in README


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_python_example_runs_and_prints_what_the_readme_shows(example, capsys):
    exec(compile(example, "README.md", "exec"), {})
    expected = [line.split("# -> ")[1] for line in example.splitlines() if "# -> " in line]
    assert capsys.readouterr().out.splitlines()[: len(expected)] == expected
