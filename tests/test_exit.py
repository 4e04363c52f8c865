"""Interruptions: of a script that ends, whatever is on its way then, and of a call after which others follow."""

import os
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest

from spec_jax.models.decoder import Decoder
from spec_jax.models.layers import random_weights
from tests.conftest import TINY, write_model_folder

ENDINGS = {
    "when a call has returned": "llm.generate(prompt, params); sys.exit(3)",
    "interrupted in a call": """
signal.signal(signal.SIGALRM, lambda *_: sys.exit(3))
signal.setitimer(signal.ITIMER_REAL, 0.2)
while True:
    llm.generate(prompt, params)
""",
}
SCRIPT = """
import signal, sys
from spec_jax import LLM, SamplingParams
llm = LLM(sys.argv[1], draft="none", dtype="float32", max_num_seqs=2)
prompt, params = "one two three", SamplingParams(max_tokens=200, ignore_eos=True)
llm.generate(prompt, params)
sys.setswitchinterval(100)  # what a thread of JAX's still wants of the interpreter, it gets only when that is torn down
"""


INTERRUPTED = """
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
signal.signal(signal.SIGALRM, interrupt)
expected = llm.generate(prompt, params)[0].token_ids
for i in range(1, 25):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.004 * i)
        while True:
            llm.generate(prompt, params)
    except Interrupted:
        assert llm.generate(prompt, params)[0].token_ids == expected
sys.exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model slow enough that bursts are still on their way."""
    config = replace(TINY, hidden_size=512, num_layers=4, ffn_size=1024)
    decoder = Decoder(random_weights(seed=5, dtype=jnp.float32), config)
    return write_model_folder(tmp_path_factory.mktemp("exit") / "model", decoder)


def run(script, folder, **environment):
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_with_its_own_exit_status(folder, ending):
    run(SCRIPT + ENDINGS[ending], folder, CC="no-such-compiler")  # XLA's own kernels run on its threads


def test_calls_after_an_interrupted_one_are_right(folder):
    run(SCRIPT + INTERRUPTED, folder)
