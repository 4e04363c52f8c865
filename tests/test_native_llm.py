"""A model whose shapes the native kernels take, with them and without: the same text."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import jax.numpy as jnp
import pytest

from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from tests.conftest import TINY, write_model_folder

RUN = """
    import json, sys
    import jax
    from spec_jax import LLM, SamplingParams
    folder, draft = sys.argv[1:]
    llm = LLM(folder, draft=draft, dtype="float32", max_num_seqs=3, max_model_len=96)
    prompts = ["one two three one two three one", "a", "the quick brown fox " * 3]
    params = [SamplingParams(max_tokens=24, temperature=t, seed=1, ignore_eos=True) for t in (0.0, 0.8, 0.0)]
    print(json.dumps([list(output.token_ids) for output in llm.generate(prompts, params)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = replace(TINY, hidden_size=64, head_dim=32, num_heads=6, num_kv_heads=2, ffn_size=96)
    decoder = Decoder(random_weights(seed=5, dtype=jnp.float32), config)
    return write_model_folder(tmp_path_factory.mktemp("native") / "model", decoder)


def texts(folder, cache, draft, **environment):
    """The texts, and what was said on the way."""
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(folder), draft]
    environment = os.environ | {"SPEC_JAX_CACHE": str(cache)} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_text_is_that_of_xla_alone_and_a_missing_compiler_is_told_once(folder, tmp_path):
    native, silent = texts(folder, tmp_path, "ngram")
    plain, said = texts(folder, tmp_path, "none", CC="no-such-compiler")
    assert native == plain
    assert [len(text) for text in native] == [24, 24, 24]
    assert "compiler" not in silent
    assert said.count("twice as long as it could: no C compiler was found as 'no-such-compiler': install GCC") == 1
    assert list((tmp_path / "native").glob("kernels-*.so"))
