"""Draft heads on disk: every published form against a float64 head, what is written, and every way in which one is unfit."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken

from spec_jax.checkpoints import drafts, export_head, open_drafter, open_head, open_model
from spec_jax.checkpoints.eagle import FINGERPRINT, LAYER_IDS, vocabulary_fingerprint
from spec_jax.config import EagleConfig, LinearRopeScaling, Llama3RopeScaling, ModelConfig
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from spec_jax.models.eagle import EagleHead, create_head
from spec_jax.models.layers import random_weights
from spec_jax.tokenizer import Tokenizer
from tests.checkpoints.helpers import edit_config, edit_tensors
from tests.conftest import TINY, byte_tokenizer
from tests.eagle_reference import ReferenceHead, random_tensors, run_head

TARGET = replace(TINY, num_layers=8)
TOKENIZER = Tokenizer(byte_tokenizer())
LAYER = replace(TINY, num_layers=1, ffn_size=40, num_heads=6, num_kv_heads=3, rope_theta=500.0)
EAGLE3 = EagleConfig(
    version=3, layer=LAYER, target_hidden_size=32, draft_vocab_size=100, captured=(2, 4, 5), has_target_ids=True
)  # fmt: skip
EAGLE1 = EagleConfig(version=1, layer=LAYER, target_hidden_size=32, draft_vocab_size=259)
TEXT = [5, 40, 41, 42, 7, 7, 40, 41, 200, 3, 258]
DEFAULT = "EAGLE-3 (original format), takes the inputs of layers 2, 4, 5 of 8 (by default)"


def llama_fields(config: EagleConfig) -> dict[str, Any]:
    """config.json of a head as its training writes it; the longest text it saw is short."""
    layer = config.layer
    return {
        "hidden_size": layer.hidden_size, "intermediate_size": layer.ffn_size, "num_hidden_layers": layer.num_layers,
        "num_attention_heads": layer.num_heads, "num_key_value_heads": layer.num_kv_heads, "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps, "rope_theta": layer.rope_theta, "rope_scaling": None,
        "vocab_size": layer.vocab_size, "max_position_embeddings": 16, "hidden_act": "silu", "model_type": "llama",
    }  # fmt: skip


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def write_original(folder: Path, config: EagleConfig = EAGLE3, **fields: Any) -> Path:
    """The form of SafeAILab, which SpecForge, SGLang and NVIDIA write as well."""
    tensors = random_tensors(config, layer0="midlayer." if config.version == 3 else "layers.0.")
    if "d2t" in tensors:
        tensors["t2d"] = np.isin(np.arange(259), tensors["d2t"] + np.arange(len(tensors["d2t"])))
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size}
    return write(folder, raw | llama_fields(config) | fields, tensors)


def write_speculators(folder: Path, config: EagleConfig, kind: str = "eagle3", **fields: Any) -> Path:
    tensors = random_tensors(config)
    if "d2t" in tensors:
        tensors["t2d"] = np.isin(np.arange(259), tensors["d2t"] + np.arange(len(tensors["d2t"])))
    raw = {
        "speculators_model_type": kind, "speculators_version": "0.3.0", "architectures": ["Eagle3Speculator"],
        "speculators_config": {"algorithm": kind, "proposal_methods": [], "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": llama_fields(config), "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual, "target_hidden_size": None, LAYER_IDS: None,
        "embed_requires_grad": False,
    }  # fmt: skip
    return write(folder, raw | fields, tensors)


def open_for(folder: Path, target: ModelConfig = TARGET) -> Any:
    return open_head(folder, target, TOKENIZER)


@contextmanager
def refuses(*texts: str) -> Iterator[None]:
    """A UserError, in one line, that says each of `texts`."""
    with pytest.raises(UserError) as info:
        yield
    message = str(info.value)
    assert "\n" not in message
    assert [text for text in texts if text not in message] == [], message


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_original(tmp_path / "head")


# --- what is read -----------------------------------------------------------------------------------------------------

HAS_ALL = replace(EAGLE3, has_embedding=True, norm_before_residual=True, norm_before_fc=True, fc_bias=True)
WHOLE = replace(EAGLE3, draft_vocab_size=259, has_target_ids=False)
FC_NORM = replace(EAGLE3, fc_norm=True, norm_output=True)
WIDE = replace(EAGLE3, layer=replace(LAYER, hidden_size=48), has_embedding=True)
TWO = replace(EAGLE3, layer=replace(LAYER, num_layers=2))
IDS = {LAYER_IDS: [2, 4, 5]}
OUTPUTS = {"eagle_config": {LAYER_IDS: [1, 3, 4], "use_aux_hidden_state": True}}
AS_INPUTS = "takes the inputs of layers 2, 4, 5 of 8 (named as inputs)"
AS_OUTPUTS = "takes the inputs of layers 2, 4, 5 of 8 (named as outputs of the layers before)"
SHARED, OWN = "the target's embeddings", "embeddings of its own"
SOME, ALL = "draft vocabulary 100 of 259", "draft vocabulary 259 of 259"
FORMS: dict[str, tuple[EagleConfig, Callable[[Path], Path], str]] = {
    "original": (EAGLE3, write_original, f"{DEFAULT}, {SOME}, {SHARED}"),
    "original with embeddings": (
        replace(EAGLE3, has_embedding=True),
        lambda folder: write_original(folder, replace(EAGLE3, has_embedding=True)),
        f"{DEFAULT}, {SOME}, {OWN}",
    ),
    "original without d2t": (WHOLE, lambda folder: write_original(folder, WHOLE), f"{DEFAULT}, {ALL}, {SHARED}"),
    "original of another width": (
        WIDE, lambda folder: write_original(folder, WIDE, target_hidden_size=32), f"{DEFAULT}, {SOME}, {OWN}",
    ),
    "original of two layers": (TWO, lambda folder: write_original(folder, TWO), f"{DEFAULT}, {SOME}, {SHARED}"),
    "outputs are named": (
        EAGLE3,
        lambda folder: write_original(folder, **OUTPUTS),
        f"EAGLE-3 (original format), {AS_OUTPUTS}, {SOME}, {SHARED}",
    ),
    "inputs are named": (
        EAGLE3,
        lambda folder: write_original(folder, **IDS),
        f"EAGLE-3 (original format), {AS_INPUTS}, {SOME}, {SHARED}",
    ),
    "both are named": (
        EAGLE3,
        lambda folder: write_original(folder, **IDS, **OUTPUTS),
        f"EAGLE-3 (original format), {AS_INPUTS}, {SOME}, {SHARED}",
    ),
    "EAGLE-3.1": (
        FC_NORM, lambda folder: write_original(folder, FC_NORM, norm_output=True), f"{DEFAULT}, {SOME}, {SHARED}",
    ),
    "speculators": (
        HAS_ALL,
        lambda folder: write_speculators(folder, HAS_ALL, **IDS),
        f"EAGLE-3 (speculators format), {AS_INPUTS}, {SOME}, {OWN}",
    ),
    "speculators without layer ids": (
        EAGLE3,
        lambda folder: write_speculators(folder, EAGLE3),
        f"EAGLE-3 (speculators format), takes the inputs of layers 2, 4, 5 of 8 (by default), {SOME}, {SHARED}",
    ),
    "EAGLE-1": (
        EAGLE1,
        lambda folder: write_original(folder, EAGLE1),
        f"EAGLE-1 (original format), takes the last hidden states, the target's vocabulary, {SHARED}",
    ),
    "EAGLE-1 with bias and embeddings": (
        replace(EAGLE1, fc_bias=True, has_embedding=True),
        lambda folder: write_original(folder, replace(EAGLE1, fc_bias=True, has_embedding=True), bias=True),
        f"EAGLE-1 (original format), takes the last hidden states, the target's vocabulary, {OWN}",
    ),
    "EAGLE-1 of two layers": (
        replace(EAGLE1, layer=replace(LAYER, num_layers=2)),
        lambda folder: write_original(folder, replace(EAGLE1, layer=replace(LAYER, num_layers=2))),
        f"EAGLE-1 (original format), takes the last hidden states, the target's vocabulary, {SHARED}",
    ),
    "speculators of EAGLE-1": (
        EAGLE1,
        lambda folder: write_speculators(folder, EAGLE1, "eagle"),
        f"EAGLE-1 (speculators format), takes the last hidden states, the target's vocabulary, {SHARED}",
    ),
}  # fmt: skip


def assert_same(head: EagleHead, config: EagleConfig, folder: Path, target: Decoder) -> None:
    """Outputs and scores of `head` are those of the published tensors in `folder`."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("t2d", None)
    reference = ReferenceHead(config, tensors, np.asarray(target.embedding[...]), np.asarray(target.head[...]))
    features = np.random.default_rng(5).normal(size=(len(TEXT), config.feature_size))
    outputs, scores = run_head(head, target, features, TEXT)
    expected = reference.run(reference.fuse(features), TEXT)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)
    np.testing.assert_allclose(scores, reference.scores(expected), atol=1e-4)
    if config.has_target_ids:
        assert head.target_ids[...].tolist() == reference.target_ids.tolist()
        assert head.target_ids[...].dtype == jnp.int32


@pytest.mark.parametrize("form", FORMS)
def test_a_head_loads_from_every_published_form(form: str, tmp_path: Path, tiny_decoder: Decoder) -> None:
    config, write_form, description = FORMS[form]
    files = open_for(write_form(tmp_path / "head"))
    layer = replace(config.layer, max_position=TARGET.max_position, eos_token_ids=())
    assert files.config == replace(config, layer=layer)  # how long its training texts were is no limit
    assert files.description == f"draft head head: {description}"
    assert_same(files.load(dtype="float32"), config, tmp_path / "head", tiny_decoder)


def test_names_may_begin_with_model(original: Path, tiny_decoder: Decoder) -> None:
    names = load_file(original / "model.safetensors")
    write(original, json.loads((original / "config.json").read_text()), {f"model.{n}": t for n, t in names.items()})
    scores = [run_head(open_for(original).load(dtype="float32"), tiny_decoder, np.ones((3, 96)), [4, 5, 6])[1]]
    write_original(original)
    scores.append(run_head(open_for(original).load(dtype="float32"), tiny_decoder, np.ones((3, 96)), [4, 5, 6])[1])
    np.testing.assert_array_equal(*scores)


def test_biases_inside_the_layer_are_those_that_the_file_holds(original: Path, tiny_decoder: Decoder) -> None:
    random = np.random.default_rng(0)

    def add(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            if "_proj.weight" in name:
                tensors[name.replace("weight", "bias")] = random.normal(size=len(tensors[name])).astype(np.float32)

    head = open_for(edit_tensors(original, add)).load(dtype="float32")
    assert_same(head, replace(EAGLE3, layer=head.config.layer), original, tiny_decoder)


def test_an_eagle1_head_may_bring_a_copy_of_the_targets_scores(tmp_path: Path, tiny_decoder: Decoder) -> None:
    """speculators and vLLM files can hold an `lm_head` beside an EAGLE-1 layer."""
    folder = write_original(tmp_path / "head", EAGLE1)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": np.asarray(tiny_decoder.head[...])}))
    files = open_for(folder)
    assert files.config.version == 1
    assert_same(files.load(dtype="float32"), EAGLE1, folder, tiny_decoder)


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 3e5, "rope_scaling": None}, 3e5, None),
        ({"rope_theta": ...}, 1e4, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e5}}, 2e5, None),
        ({"rope_theta": 3e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 3e5, LinearRopeScaling(2.0)),
        (
            {"rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }},
            500.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
        ),
    ],
)  # fmt: skip
def test_rotary_embeddings_are_those_of_the_heads_config(
    original: Path, fields: dict[str, Any], theta: float, scaling: Any
) -> None:
    layer = open_for(edit_config(original, **fields)).config.layer
    assert (layer.rope_theta, layer.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("where", ["top", "transformer_layer_config", "eagle_config"])
def test_flags_are_found_wherever_they_stand(tmp_path: Path, where: str) -> None:
    flags = {"norm_before_residual": True, "norm_output": True}
    if where == "transformer_layer_config":
        folder = write_speculators(tmp_path / "head", EAGLE3)
        edit_config(folder, norm_before_residual=..., transformer_layer_config=llama_fields(EAGLE3) | flags)
    else:
        folder = write_original(tmp_path / "head", **(flags if where == "top" else {"eagle_config": flags}))
    config = open_for(folder).config
    assert (config.norm_before_residual, config.norm_output) == (True, True)


def test_a_tokenizer_or_fingerprint_of_the_same_vocabulary_is_accepted(original: Path) -> None:
    edit_config(original, **{FINGERPRINT: vocabulary_fingerprint(TOKENIZER)})
    byte_tokenizer().save(str(original / "tokenizer.json"))
    assert open_for(original).config.version == 3
    edit_config(original, **{FINGERPRINT: ...})
    assert open_for(original).config.version == 3


# --- what is written --------------------------------------------------------------------------------------------------


def exported(folder: Path, target: ModelConfig = TARGET, **changes: Any) -> EagleHead:
    """A bfloat16 head of random weights, and `folder` with it."""
    ids = jnp.asarray(np.sort(np.random.default_rng(3).permutation(259)[:100]), jnp.int32)
    weights = random_weights(seed=7, dtype=jnp.bfloat16)
    config = replace(EAGLE3, **changes)
    head = create_head(lambda path, *rest: ids if path == "target_ids" else weights(path, *rest), config)
    export_head(head, target, TOKENIZER, folder, {"note": "a test"})
    return head


def test_an_exported_head_loads_back_as_it_was(tmp_path: Path, tiny_decoder: Decoder) -> None:
    target = Decoder(random_weights(seed=1, dtype=jnp.bfloat16), TINY)
    head = exported(tmp_path / "new" / "head")
    files = open_for(tmp_path / "new" / "head")
    assert files.config == replace(head.config, layer=replace(head.config.layer, eos_token_ids=()))
    features = np.random.default_rng(5).normal(size=(len(TEXT), 96))
    before, after = (run_head(h, target, features, TEXT) for h in (head, files.load(dtype="bfloat16")))
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_same(files.load(dtype="float32"), files.config, tmp_path / "new" / "head", tiny_decoder)
    assert not list((tmp_path / "new" / "head").glob("*.partial"))


def test_an_export_has_the_tensors_of_the_eagle3_format(tmp_path: Path) -> None:
    head = exported(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    D, F, q, kv = 32, 40, 48, 24
    expected = {
        "fc.weight": (D, 3 * 32),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * D),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * D),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, q),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.mlp.gate_proj.weight": (F, D),
        "midlayer.mlp.up_proj.weight": (F, D),
        "midlayer.mlp.down_proj.weight": (D, F),
        "norm.weight": (D,),
        "lm_head.weight": (100, D),
    }
    others = {"d2t": tensors.pop("d2t"), "t2d": tensors.pop("t2d")}
    assert {name: value.shape for name, value in tensors.items()} == expected
    assert {value.dtype for value in tensors.values()} == {np.dtype(jnp.bfloat16)}
    ids = head.target_ids[...].tolist()
    assert (others["d2t"].dtype, others["t2d"].dtype, others["t2d"].shape) == (np.int64, np.bool_, (259,))
    assert (others["d2t"] + np.arange(100)).tolist() == ids == np.flatnonzero(others["t2d"]).tolist()


def test_an_exports_config_names_layers_in_both_conventions(tmp_path: Path) -> None:
    exported(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw[LAYER_IDS] == [2, 4, 5]
    assert raw["eagle_config"][LAYER_IDS] == [1, 3, 4]
    assert (raw["architectures"], raw["note"]) == (["LlamaForCausalLMEagle3"], "a test")
    assert (raw["vocab_size"], raw["draft_vocab_size"], raw["target_hidden_size"]) == (259, 100, 32)
    assert raw[FINGERPRINT] == vocabulary_fingerprint(TOKENIZER)
    for kept, dropped in (({LAYER_IDS: ...}, AS_OUTPUTS), ({LAYER_IDS: [2, 4, 5], "eagle_config": ...}, AS_INPUTS)):
        assert dropped in open_for(edit_config(tmp_path, **kept)).description


@pytest.mark.parametrize("scaling", [LinearRopeScaling(4.0), Llama3RopeScaling(8.0, 1.0, 4.0, 64)])
def test_an_export_keeps_its_rotary_scaling(tmp_path: Path, scaling: Any) -> None:
    head = exported(tmp_path, layer=replace(LAYER, rope_scaling=scaling))
    assert open_for(tmp_path).config.layer == replace(head.config.layer, eos_token_ids=())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_head_for_another_hidden_size_is_refused(original: Path) -> None:
    with refuses(str(original), "hidden size 32", "has 64"):
        open_for(original, replace(TARGET, hidden_size=64))
    with refuses(str(original), "hidden size 64", "has 32"):
        open_for(edit_config(original, target_hidden_size=64))


def test_a_head_of_another_width_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    folder = write_original(tmp_path / "head", replace(WIDE, has_embedding=False), target_hidden_size=32)
    with refuses("no embed_tokens.weight", "48", "32"):
        open_for(folder)


def test_an_eagle1_head_of_another_width_is_refused(tmp_path: Path) -> None:
    config = replace(EAGLE1, layer=replace(LAYER, hidden_size=48), has_embedding=True)
    with refuses("48", "32"):
        open_for(write_original(tmp_path / "head", config, target_hidden_size=32))


def test_a_head_for_another_vocabulary_is_refused(original: Path) -> None:
    with refuses(str(original), "259", "260"):
        open_for(original, replace(TARGET, vocab_size=260))


def test_a_head_with_another_tokenizer_is_refused(original: Path) -> None:
    other = byte_tokenizer()
    other.add_special_tokens([AddedToken("<|another|>", special=True)])
    other.save(str(original / "tokenizer.json"))
    theirs, ours = vocabulary_fingerprint(Tokenizer(other))[:12], vocabulary_fingerprint(TOKENIZER)[:12]
    with refuses("another tokenizer", theirs, ours):
        open_for(original)


def test_a_head_with_another_fingerprint_is_refused(original: Path) -> None:
    with refuses("another tokenizer", "abcabc", vocabulary_fingerprint(TOKENIZER)[:12]):
        open_for(edit_config(original, **{FINGERPRINT: "abcabc"}))


def test_tokenizers_of_the_same_tokens_in_another_order_have_other_fingerprints() -> None:
    tokens = TOKENIZER.tokens()

    class Swapped:
        def tokens(self) -> list[str]:
            return [tokens[1], tokens[0], *tokens[2:]]

    assert vocabulary_fingerprint(Swapped()) != vocabulary_fingerprint(TOKENIZER)  # type: ignore[arg-type]


REQUIRED = {
    "EAGLE-3": [name for name in random_tensors(EAGLE3, layer0="midlayer.") if name != "d2t"],
    "EAGLE-1": list(random_tensors(EAGLE1)),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in REQUIRED.items() for name in names])
def test_a_missing_tensor_is_named(kind: str, name: str, tmp_path: Path) -> None:
    folder = write_original(tmp_path / "head", EAGLE3 if kind == "EAGLE-3" else EAGLE1)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with refuses(str(folder), f"has no tensor {name.replace('midlayer.', 'layers.0.')}"):
        open_for(folder).load()


@pytest.mark.parametrize("name", ["norm.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight"])
def test_a_tensor_of_the_wrong_shape_is_refused(original: Path, name: str) -> None:
    with refuses("shape"):
        open_for(edit_tensors(original, lambda t: t.update({name: t[name][..., :-1].copy()}))).load()


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "d2t"])
def test_a_tensor_without_axes_is_refused(original: Path, name: str) -> None:
    with refuses(str(original)):
        open_for(edit_tensors(original, lambda t: t.update({name: np.asarray(t[name].flat[0])}))).load()


def test_truncated_weights_are_refused_wherever_they_are_cut(original: Path) -> None:
    path = original / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for size in [0, 1, 8, 100, header - 1, header, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with refuses(f"{path} is truncated or is no safetensors file"):
            open_for(original)


@pytest.mark.parametrize(("place", "token"), [(0, -1), (7, 259), (99, 10**12), (3, -(10**12))])
def test_draft_ids_that_the_target_has_not_are_refused(original: Path, place: int, token: int) -> None:
    with refuses(f"d2t maps {place} to token {token}", "ids 0 to 258"):
        open_for(edit_tensors(original, lambda t: t["d2t"].__setitem__(place, token - place)))


@pytest.mark.parametrize("size", [0, 1, 99, 101])
def test_draft_ids_of_another_number_than_scores_are_refused(original: Path, size: int) -> None:
    with refuses("d2t has shape", str(size), "lm_head 100"):
        open_for(edit_tensors(original, lambda t: t.update(d2t=np.zeros(size, np.int64))))


def test_a_smaller_vocabulary_without_draft_ids_is_refused(original: Path) -> None:
    with refuses(str(original), "no d2t", "100", "259"):
        open_for(edit_tensors(original, lambda t: t.pop("d2t")))


@pytest.mark.parametrize("width", [32, 64, 95, 128])
def test_a_first_map_of_another_width_is_refused(original: Path, width: int) -> None:
    with refuses("fc.weight", str(width), "3 layers", "96"):
        open_for(edit_tensors(original, lambda t: t.update({"fc.weight": np.zeros((32, width), np.float32)})))


@pytest.mark.parametrize(
    "fields",
    [
        {LAYER_IDS: [2, 4, 9]},
        {LAYER_IDS: [-1, 4, 5]},
        {LAYER_IDS: [1.0, 4, 5]},
        {"eagle_config": {LAYER_IDS: [1, 3, 8]}},
        {"eagle_config": {LAYER_IDS: [-2, 3, 4]}},
    ],
)
def test_layers_that_the_target_has_not_are_refused(original: Path, fields: dict[str, Any]) -> None:
    with refuses("layers (", "the target has 8 layers"):
        open_for(edit_config(original, **fields))


def test_the_last_layers_output_can_be_taken(original: Path) -> None:
    assert open_for(edit_config(original, eagle_config={LAYER_IDS: [0, 3, 7]})).config.captured == (1, 4, 8)
    assert open_for(edit_config(original, **{LAYER_IDS: [0, 3, 8]})).config.captured == (0, 3, 8)


def test_a_target_without_enough_layers_for_the_default_is_refused(original: Path) -> None:
    with refuses("layers (2, 1, -1) (by default)", "2 layers"):
        open_for(original, TINY)


def test_a_folder_without_config_is_refused(original: Path) -> None:
    (original / "config.json").unlink()
    with refuses(f"{original} has no config.json"):
        open_for(original)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3"])
def test_a_broken_config_is_refused(original: Path, content: str) -> None:
    (original / "config.json").write_text(content)
    with refuses(f"{original / 'config.json'} cannot be read"):
        open_for(original)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "rms_norm_eps"]
)
def test_a_missing_field_is_named(original: Path, name: str) -> None:
    with refuses(f"{original / 'config.json'} lacks the field '{name}'"):
        open_for(edit_config(original, **{name: ...}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": "32", "head_dim": None}, "has a field of the wrong kind"),
        ({"hidden_size": None, "head_dim": None}, "has a field of the wrong kind"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "has a field of the wrong kind"),
        ({"num_attention_heads": [6]}, "config.json"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": "1"}, "num_layers is '1'"),
        ({"intermediate_size": 2.5}, "ffn_size is 2.5"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": [1]}, "has a field of the wrong kind"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' is not supported; supported: default, linear, llama3"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; supported: silu"),
        ({"vocab_size": "259"}, "vocab_size is '259'"),
        ({"target_hidden_size": "32"}, "hidden size 32"),
        ({"eagle_config": [1]}, "has a field of the wrong kind"),
        ({LAYER_IDS: 5}, "has a field of the wrong kind"),
        ({LAYER_IDS: "abc"}, "layers"),
        ({"eagle_config": {LAYER_IDS: ["1", "2", "3"]}}, "has a field of the wrong kind"),
        ({"num_key_value_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"speculators_model_type": "eagle3"}, "lacks the field 'transformer_layer_config'"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": 3}, "has a field of the wrong kind"),
        ({"speculators_model_type": 3, "transformer_layer_config": {}}, ""),
    ],
)
def test_an_unfit_field_is_refused(original: Path, fields: dict[str, Any], message: str) -> None:
    with refuses(message):
        open_for(edit_config(original, **fields))


def test_a_folder_of_bin_weights_is_refused(original: Path) -> None:
    (original / "model.safetensors").rename(original / "pytorch_model.bin")
    with refuses(f"{original} has no .safetensors file", ".bin"):
        open_for(original)


def test_a_head_that_drafts_in_parallel_is_refused(original: Path) -> None:
    with refuses(str(original), "P-EAGLE"):
        open_for(edit_tensors(original, lambda t: t.update(mask_hidden=np.zeros((1, 32), np.float32))))


@pytest.mark.parametrize("kind", ["peagle", "dflash", "mtp", "mlp_speculator"])
def test_a_speculator_of_another_type_is_refused(tmp_path: Path, kind: str) -> None:
    with refuses(f"type {kind}", "supported are eagle and eagle3"):
        open_for(write_speculators(tmp_path / "head", EAGLE3, kind))


def test_a_whole_model_is_no_head(tiny_folder: Path) -> None:
    with refuses(str(tiny_folder), "fc.weight"):
        open_for(tiny_folder)


# --- what is meant by --draft -----------------------------------------------------------------------------------------


@pytest.fixture
def target(tiny_folder: Path) -> Any:
    return open_model(str(tiny_folder))


@pytest.fixture
def fitting(tmp_path: Path) -> Path:
    """A head for the model of two layers."""
    return write_original(tmp_path / "mine", **{LAYER_IDS: [0, 1, 2]})


def found(drafter: Any) -> tuple[bool, int | None]:
    return drafter.uses_ngrams, None if drafter.head is None else drafter.head.config.version


@pytest.mark.parametrize(("draft", "uses_ngrams"), [("auto", True), ("ngram", True), ("none", False)])
def test_a_model_without_a_head_has_ngrams_or_nothing(target: Any, draft: str, uses_ngrams: bool) -> None:
    assert found(open_drafter(draft, str(target.path), target)) == (uses_ngrams, None)


def test_a_folder_is_that_head_with_ngrams_and_after_eagle_alone(target: Any, fitting: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="spec_jax"):
        assert found(open_drafter(str(fitting), "x", target)) == (True, 3)
        assert found(open_drafter(f"eagle:{fitting}", "x", target)) == (False, 3)
    assert [record.message for record in caplog.records] == [
        "draft head mine: EAGLE-3 (original format), takes the inputs of layers 0, 1, 2 of 2 (named as inputs), "
        "draft vocabulary 100 of 259, the target's embeddings"
    ] * 2


def test_the_head_that_comes_with_a_model_is_found_by_its_name(
    target: Any, fitting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_HEADS", fitting.parent)
    monkeypatch.setattr(drafts, "BUILTIN_MODELS", {"mine": None, "without": None})
    assert found(open_drafter("auto", "mine", target)) == (True, 3)
    assert found(open_drafter("eagle", "mine", target)) == (False, 3)
    assert found(open_drafter("ngram", "mine", target)) == (True, None)
    assert found(open_drafter("none", "mine", target)) == (False, None)
    assert found(open_drafter("auto", "without", target)) == (True, None)
    with refuses("no draft head comes with without", "eagle:FOLDER", "ngram"):
        open_drafter("eagle", "without", target)


@pytest.mark.parametrize("draft", ["unheard-of", "", "eagle:", "eagle:unheard-of", "EAGLE", " ", "ngram "])
def test_an_unknown_drafter_is_refused_with_those_that_are_known(
    target: Any, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(f"draft {draft!r} is unknown: allowed are auto, ngram, eagle, none, or a folder with a head"):
        open_drafter(draft, "x", target)


def test_no_drafter_means_the_folder_that_one_is_in(
    target: Any, fitting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fitting)
    for draft in ("", "eagle:"):
        with refuses(f"draft {draft!r} is unknown"):
            open_drafter(draft, "x", target)


@pytest.mark.parametrize("prefix", ["", "eagle:"])
def test_a_file_is_no_head(target: Any, fitting: Path, prefix: str) -> None:
    path = fitting / "model.safetensors"
    with refuses(f"draft '{prefix}{path}' is no folder"):
        open_drafter(f"{prefix}{path}", "x", target)


def test_a_models_name_is_no_drafter_and_fetches_nothing(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str) -> Path:
        pytest.fail(f"{model} would have been fetched")

    monkeypatch.setattr("spec_jax.checkpoints.resolve.fetch", fetch)
    with refuses("allowed are auto, ngram, eagle, none"):
        open_drafter("smollm2-135m", "x", target)


def test_a_hub_id_that_cannot_be_fetched_is_named(target: Any) -> None:
    with refuses("owner/head"):
        open_drafter("owner/head", "x", target)
