"""`compile-check` on the real programs, for real GPU targets; and that it sees what it is there to see."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from spec_jax.compile_check import thunks
from spec_jax.compile_check.check import find_shape
from spec_jax.compile_check.copies import large_copies
from spec_jax.compile_check.kernels import Kernel, parse_kernels
from spec_jax.compile_check.report import ProgramReport, Report
from spec_jax.compile_check.targets import TARGETS, mesh_of
from spec_jax.errors import UserError
from spec_jax.shapes import SHAPES

FIXTURES = Path(__file__).parent / "fixtures"
needs_compiler = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import jax_plugins.xla_cuda13"], capture_output=True).returncode != 0,
    reason="needs jax-cuda13-plugin",
)


def check(*arguments: str) -> dict:
    """Runs the command; one process per target, as Mosaic remembers the first."""
    done = subprocess.run(
        [sys.executable, "-m", "spec_jax", "compile-check", *arguments, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


LLAMA_70B = ("llama-3.1-70b", 8, "fp8", 32)
LLAMA_8B = ("llama-3.1-8b", 1, "auto", 8)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("target", "devices"), [("h200", 1), ("b200", 8)])
def test_with_a_draft_head_the_loop_is_still_one_cuda_graph(target, devices):
    """Drafting stands in a branch of the loop: its launches are counted apart; its bytes are those of the head's shape."""
    found = check(
        "--model", "llama-3.1-8b", "--target", target, "--devices", str(devices), "--draft", "auto", "--num-layers", "6",
        "--max-model-len", "4096",
    )  # fmt: skip
    assert found["ok"] is True
    burst = found["programs"][0]
    assert burst["command_buffers"] == 1
    assert burst["loop_in_command_buffer"] is True
    assert burst["copies_of_weights_or_cache"] == []
    assert burst["launches_when_needed"] > 5 * 10  # five drafts, a layer and scores each
    qkv, output, mlp = 6144 * 8192, 4096 * 4096, 3 * 4096 * 14_336
    fusion, scores = 3 * 4096 * 4096, 32_000 * 4096
    least = 2 * (fusion + 5 * (qkv + output + mlp + scores) / devices)
    assert found["rounds"][0]["draft_bytes"] == pytest.approx(least, rel=0.03)


@needs_compiler
@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("h200", LLAMA_70B),
        pytest.param("b200", LLAMA_8B, marks=pytest.mark.slow),
        pytest.param("b200", LLAMA_70B, marks=pytest.mark.slow),
        pytest.param("h200", LLAMA_8B, marks=pytest.mark.slow),
        pytest.param("h200", ("qwen3-8b", 4, "fp8", 8), marks=pytest.mark.slow),
        pytest.param("b200", ("smollm2-135m", 3, "auto", 8), marks=pytest.mark.slow),
    ],
)
def test_the_loop_is_one_cuda_graph_that_keeps_its_memory(target, case):
    """Four layers of the real shapes: all layers are alike."""
    model, devices, cache, slots = case
    found = check(
        "--model", model, "--target", target, "--devices", str(devices), "--kv-cache-dtype", cache,
        "--max-num-seqs", str(slots), "--num-draft-tokens", "5", "--num-layers", "4",
    )  # fmt: skip
    assert found["ok"] is True
    assert found["attention"] == "Mosaic"
    burst, prefill = found["programs"]
    assert burst["command_buffers"] == prefill["command_buffers"] == 1
    assert burst["loop_in_command_buffer"] is True
    assert prefill["loop_in_command_buffer"] is None
    for program in (burst, prefill):
        assert set(program["thunks_outside"]) <= {"kCopy"}
        assert program["host_transfers"] == 0
        assert program["copies_of_weights_or_cache"] == []
        assert program["aliased_bytes"] >= found["cache_bytes"]
        names = {kernel["name"] for kernel in program["kernels"]}
        assert names >= {"paged_attention"}
        assert all(kernel["spilled_bytes"] == 0 for kernel in program["kernels"])
        assert all(kernel["shared_bytes"] <= 227 * 1024 for kernel in program["kernels"])
    # Two all-reduces a layer, behind attention and behind the feed-forward, and one for the embedding.
    reduced = burst["collectives_per_round"].get("kAllReduce", 0)
    assert reduced == (9 if devices > 1 else 0)
    assert found["used_bytes"] < found["memory_bytes"]
    assert found["kv_tokens_that_fit"] >= found["num_kv_tokens"]


def tree(name: str) -> thunks.Thunk:
    return thunks.parse_thunks((FIXTURES / f"thunks_{name}.txt").read_text())


def test_a_loop_in_a_graph_is_read_as_such():
    program = tree("graph")
    assert len(thunks.command_buffers(program)) == 1
    assert thunks.holds_loop(program)
    assert thunks.outside(program) == Counter()
    assert thunks.host_transfers(program) == 0
    always, sometimes = thunks.round_thunks(program)
    assert thunks.collectives(always) == {"kReduceScatter": 2, "kAllReduce": 1}
    assert thunks.collectives(sometimes) == {"kAllToAll": 1}
    assert thunks.num_launches(always) == 11


def test_a_loop_that_the_host_drives_is_read_as_such():
    program = tree("host")
    assert not thunks.holds_loop(program)
    assert thunks.outside(program) == {"kWhile": 1}
    assert thunks.host_transfers(program) == 2  # the loop, and the one over layers inside it
    always, sometimes = thunks.round_thunks(program)
    assert thunks.collectives(always) == {"kAllReduce": 1}
    assert thunks.collectives(sometimes) == {"kReduceScatter": 1, "kAllToAll": 2}


@pytest.mark.parametrize("kind", ["kHostSend", "kInfeed", "kOutfeed", "kRecvDone", "kHostExecuteStart"])
def test_what_needs_the_host_is_counted_even_inside_a_graph(kind):
    text = (FIXTURES / "thunks_graph.txt").read_text().replace("kReduceScatter", kind)
    assert thunks.host_transfers(thunks.parse_thunks(text)) == 2


HLO = """\
%fused_copy (p: bf16[64,32]) -> bf16[32,64] {
  ROOT %transpose.1 = bf16[32,64]{1,0} transpose(%p), dimensions={1,0}
}
%body (arg: (bf16[64,32], u8[10,2,16,64])) -> (bf16[64,32], u8[10,2,16,64]) {
  %copy.2 = bf16[8,8]{1,0} copy(%small)
  LINE
}
ENTRY %main (p: bf16[64,32]) -> bf16[64,32] {
  %copy.9 = bf16[64,31]{1,0} copy(%p)
}
"""


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("%copy.3 = bf16[64,32]{0,1} copy(%w)", True),
        ("%transpose_copy_fusion = bf16[32,64]{1,0} fusion(%w), kind=kInput, calls=%fused_copy", True),
        ("%copy-start.1 = (u8[10,2,16,64]{3,2,1,0}, u8[10,2,16,64]{3,2,1,0}, u32[]) copy-start(%pages)", True),
        ("%all-gather.1 = bf16[64,32]{1,0} all-gather(%share), dimensions={0}", True),
        ("%copy.3 = bf16[64,31]{1,0} copy(%activations)", False),
        ("%copy.3 = f32[64,32]{1,0} copy(%other_dtype)", False),
        ("%scatter_fusion = u8[10,2,16,64]{3,2,1,0} fusion(%pages), kind=kInput, calls=%fused_scatter", False),
    ],
)
def test_copies_of_weights_and_cache_are_found_and_nothing_else(line, is_found):
    protected = {("bf16", (64, 32)), ("u8", (10, 2, 16, 64))}
    found = large_copies(HLO.replace("LINE", line), protected)
    assert bool(found) is is_found
    assert all(line.split(" ")[0].lstrip("%") in text for text in found)


ASSEMBLER = """\
ptxas info    : Compiling entry function 'paged_attention_mosaic_gpu_kernel' for 'sm_90a'
    24 bytes stack frame, 48 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 24 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compiling entry function 'write_kv_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 23 registers, used 2 barriers, 1 bytes smem
"""
LOWERING = "Resources(smem_scratch_bytes=4096, x=0)\nResources(smem_scratch_bytes=114688, x=0)\n"


def test_what_the_assembler_says_of_kernels():
    assert parse_kernels(LOWERING, ASSEMBLER) == [
        Kernel("write_kv", 23, 0, 4096),
        Kernel("paged_attention", 255, 72, 114_688),
    ]


GOOD = ProgramReport(
    name="burst", compile_s=1.0, command_buffers=1, loop_in_command_buffer=True, thunks_outside={"kCopy": 2},
    host_transfers=0, launches_per_round=9, collectives_per_round={}, launches_when_needed=0, collectives_when_needed={},
    copies_of_weights_or_cache=[], aliased_bytes=10, temporary_bytes=5,
    kernels=[Kernel("paged_attention", 200, 0, 100)],
)  # fmt: skip


def report(program: ProgramReport, **changes) -> Report:
    usual = Report(
        model="m", target="h200", devices=1, kv_cache_dtype="fp8", num_draft_tokens=5, max_num_seqs=8, max_model_len=100,
        attention="Mosaic", memory_bytes=100, usable_bytes=92, weight_bytes=50, cache_bytes=10, state_bytes=1,
        num_kv_tokens=10, kv_tokens_that_fit=20, programs=[program], rounds=[],
    )  # fmt: skip
    return replace(usual, **changes)


def test_a_good_report_has_no_faults():
    assert report(GOOD).faults == []
    assert report(GOOD).lines()[-1] == "ok: yes"
    assert report(GOOD).used_bytes == 66


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loop_in_command_buffer": False}, "the host drives it"),
        ({"command_buffers": 3}, "3 command buffers"),
        ({"thunks_outside": {"kCopy": 1, "kWhile": 1}}, "outside the command buffer: 1 kWhile"),
        ({"host_transfers": 2}, "2 transfers to or from the host"),
        ({"copies_of_weights_or_cache": ["copy.1"]}, "copies of weights or cache: copy.1"),
        ({"temporary_bytes": 2e9}, "temporaries for 10 bytes of cache: is it copied?"),
        ({"aliased_bytes": 9}, "only 9 of 10 bytes of cache are updated in place"),
        ({"kernels": [Kernel("write_kv", 9, 8, 0)]}, "write_kv spills 8 bytes"),
    ],
)
def test_every_fault_is_said(changes, said):
    found = report(replace(GOOD, **changes), usable_bytes=1e12)
    assert len(found.faults) == 1
    assert said in found.faults[0]
    assert found.lines()[-1] == "ok: no"
    assert found.as_json()["ok"] is False


def test_what_does_not_fit_is_a_fault():
    assert "are needed" in report(GOOD, weight_bytes=90).faults[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama-3.1-8b", "--target", "h100"), "target 'h100' is unknown: allowed are h200, b200"),
        (("--model", "nothing", "--target", "h200"), "model 'nothing' is neither a known shape (llama-3.1-8b,"),
        (("--model", "qwen3-8b", "--target", "h200", "--devices", "3"), "kv_heads 8 does not divide over 3 devices"),
        (("--model", "qwen3-8b", "--target", "h200", "--devices", "0"), "devices is 0: allowed are 1 to 8"),
        (("--model", "qwen3-8b", "--target", "h200", "--num-layers", "99"), "num_layers is 99: allowed are 1 to 36"),
        (("--model", "qwen3-8b", "--target", "h200", "--kv-cache-dtype", "int4"), "kv_cache_dtype 'int4' is unknown"),
        (("--model", "qwen3-8b", "--target", "h200", "--draft", "magic"), "draft 'magic' is unknown"),
        (("--model", "~nobody/x", "--target", "h200"), "model '~nobody/x' is neither a known shape"),
        (("--model", "x" * 5000, "--target", "h200"), "is neither a known shape"),
        (("--model", "", "--target", "h200"), "model '' is neither a known shape"),
        (("--model", "qwen3-8b", "--target", "h200", "--max-num-seqs", "10000000000"), "allowed are 1 to 4096"),
        (
            ("--model", "qwen3-8b", "--target", "h200", "--num-kv-tokens", "1000000000000"),
            "per device, and a h200 has",
        ),
        (("--model", "qwen3-8b", "--target", "h200", "--max-model-len", "50000"), "trained for at most 40960 tokens"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capfd):
    from spec_jax.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["compile-check", *arguments])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_without_the_compiler_the_way_to_get_it_is_said(monkeypatch):
    from importlib import metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=r'is not installed: pip install "jax-cuda13-plugin==\d'):
        mesh_of(TARGETS["h200"], 1)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    with pytest.raises(UserError, match=r"jax-cuda13-plugin 0\.1 does not fit jax"):
        mesh_of(TARGETS["h200"], 1)


def test_a_folder_or_its_config_gives_the_shape(tiny_folder, tiny_config):
    assert find_shape(str(tiny_folder)) == find_shape(str(tiny_folder / "config.json"))
    assert find_shape(str(tiny_folder)).num_layers == tiny_config.num_layers


def num_parameters(name: str) -> int:
    c = SHAPES[name]
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return c.num_layers * (attention + 3 * c.hidden_size * c.ffn_size) + tables


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("qwen3-8b", 8.19), ("smollm2-135m", 0.1345)],
)
def test_shapes_have_as_many_parameters_as_their_model_cards_say(name, billions):
    assert num_parameters(name) / 1e9 == pytest.approx(billions, rel=0.003)
