"""EAGLE draft heads: from the formats they are published in to this project's terms.

Read are the original ones (SafeAILab, and SpecForge, SGLang and NVIDIA after it) and that of `speculators`. What differs is
found by what is there: tensor names are brought to one spelling, biases and norms are those that the file holds.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spec_jax.config import EagleConfig, ModelConfig, eagle3_layers
from spec_jax.errors import UserError
from spec_jax.models.eagle import EagleHead, create_head
from spec_jax.sharding import Axes, ShardingRules, place
from spec_jax.tokenizer import Tokenizer

from .fields import check_config, damaged_fields
from .huggingface import layer_fields, read_tokenizer
from .tensor_folder import TensorFolder, read_json
from .weights import checkpoint_weights

FINGERPRINT = "target_vocabulary_sha256"
"""Key of config.json, written by this project: see `vocabulary_fingerprint`."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadFiles:
    """A draft head whose files are open and fit the target; weights not read yet. `description` is one line."""

    config: EagleConfig
    description: str
    reader: "_HeadReader"

    def load(
        self, *, dtype: str = "bfloat16", mesh: Mesh | None = None, rules: ShardingRules | None = None
    ) -> EagleHead:
        """Reads the weights, cast to `dtype`, onto the devices. Raises UserError for missing or unfit tensors."""
        weights = checkpoint_weights(self.reader, dtype, mesh, rules)

        def source(path: str, shape: tuple[int, ...], axes: Axes) -> Any:
            if path == "target_ids":
                return place(self.reader.target_ids(self.config), axes, mesh, rules or ShardingRules())
            return weights(path, shape, axes)

        return create_head(source, self.config, rules)


def open_head(folder: Path, target: ModelConfig, tokenizer: Tokenizer) -> HeadFiles:
    """Opens the draft head in `folder` for a target. Raises UserError naming what is missing, damaged or does not fit."""
    tensors = TensorFolder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: the folder of an EAGLE head is needed")
    raw = read_json(path)
    with damaged_fields(path):
        _check_tokenizer(folder, raw, tokenizer)
        reader = _HeadReader(tensors)
        config, description = _read_config(raw, reader, target, folder)
    reader.config = config.layer
    if config.has_target_ids:
        reader.target_ids(config)
    return HeadFiles(config, f"draft head {folder.name}: {description}", reader)


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 over the tokens in the order of their ids: a head speaks the ids of one vocabulary only."""
    return hashlib.sha256("\0".join(tokenizer.tokens()).encode("utf-8", "surrogatepass")).hexdigest()


class _HeadReader:
    """Tensors of a head under the names that the target's would have."""

    def __init__(self, tensors: TensorFolder):
        self._tensors = tensors
        self._stored = {_canonical(name): name for name in tensors.names}
        self.config: Any = None  # of its layers, once it is known

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._stored.get(name, name))

    def tensor(self, name: str, dtype: np.dtype) -> np.ndarray:
        name = name.removeprefix("model.")
        return self._tensors.read(self._stored.get(name, name), dtype)

    def kv_scale(self, layer: int, kind: str) -> np.ndarray | None:
        return None

    def target_ids(self, config: EagleConfig) -> np.ndarray:
        """[Vd] int32. `d2t` holds offsets: the target's id is the draft's own plus its offset."""
        offsets = self.tensor("d2t", np.dtype(np.int64))
        where = f"{self._tensors.folder}: d2t"
        if offsets.shape != (config.draft_vocab_size,):
            raise UserError(f"{where} has shape {offsets.shape}, and lm_head {config.draft_vocab_size} rows")
        ids = offsets + np.arange(len(offsets))
        wrong = np.flatnonzero((ids < 0) | (ids >= config.layer.vocab_size))
        if len(wrong):
            i = int(wrong[0])
            raise UserError(
                f"{where} maps {i} to token {ids[i]}: the target has ids 0 to {config.layer.vocab_size - 1}"
            )
        return ids.astype(np.int32)


def _canonical(name: str) -> str:
    for old, new in (
        ("model.", ""), ("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."),
    ):  # fmt: skip
        if name.startswith(old):
            name = new + name[len(old) :]
    return name


def _read_config(
    raw: dict[str, Any], reader: _HeadReader, target: ModelConfig, folder: Path
) -> tuple[EagleConfig, str]:
    layer_raw, form = raw, "original format"
    if "speculators_model_type" in raw:
        layer_raw, form = raw["transformer_layer_config"], "speculators format"
        if raw["speculators_model_type"] not in ("eagle", "eagle3") or raw.get("layernorms"):
            kind = raw["speculators_model_type"] + (" with extra norms" if raw.get("layernorms") else "")
            raise UserError(f"{folder} is a speculator of type {kind}: supported are eagle and eagle3")
    for name in ("mask_hidden", "fc.weight"):
        if (name in reader) != (name == "fc.weight"):
            what = "drafts in parallel (P-EAGLE)" if name == "mask_hidden" else "has no tensor fc.weight"
            raise UserError(f"{folder} {what}: supported are EAGLE-1 and EAGLE-3 heads")
    if raw.get("logit_scale", 1) != 1:
        raise UserError(f"{folder} scales its logits by {raw['logit_scale']}: that is not supported")
    layer = _layer_config(layer_raw, reader, target, folder)
    D = layer.hidden_size
    # An EAGLE-1 file may hold a copy of the target's lm_head; but its attention takes D channels, not 2 D.
    is_eagle3 = (
        "layers.0.hidden_norm.weight" in reader
        or "d2t" in reader
        or reader.shape("layers.0.self_attn.q_proj.weight")[-1] == 2 * D
    )
    given = raw.get("target_hidden_size") or layer_raw.get("target_hidden_size") or D
    if given != target.hidden_size:
        raise UserError(f"{folder} is for a target of hidden size {given}, this one has {target.hidden_size}")
    if layer.vocab_size != target.vocab_size:
        raise UserError(
            f"{folder} is for a vocabulary of {layer.vocab_size} tokens, the target has {target.vocab_size}"
        )
    has_embedding = "embed_tokens.weight" in reader
    if not has_embedding and target.hidden_size != D:
        raise UserError(
            f"{folder} has no embed_tokens.weight, and its hidden size {D} is not the target's {target.hidden_size}"
        )
    common: dict[str, Any] = {
        "layer": layer, "target_hidden_size": target.hidden_size, "has_embedding": has_embedding,
        "fc_bias": "fc.bias" in reader,
    }  # fmt: skip
    own = "embeddings of its own" if has_embedding else "the target's embeddings"
    if not is_eagle3:
        if target.hidden_size != D:
            raise UserError(f"{folder} has hidden size {D}, the target {target.hidden_size}: EAGLE-1 needs the same")
        config = EagleConfig(version=1, draft_vocab_size=target.vocab_size, **common)
        return config, f"EAGLE-1 ({form}), takes the last hidden states, the target's vocabulary, {own}"
    captured, source = _captured(raw, layer_raw, target)
    draft_vocab_size = reader.shape("lm_head.weight")[0]
    has_target_ids = "d2t" in reader
    if not has_target_ids and draft_vocab_size != target.vocab_size:
        raise UserError(
            f"{folder} has no d2t, and its {draft_vocab_size} output rows are not the target's {target.vocab_size} tokens"
        )
    config = EagleConfig(
        version=3, draft_vocab_size=draft_vocab_size, captured=captured, has_target_ids=has_target_ids,
        fc_norm="fc_norm.0.weight" in reader, norm_before_fc="input_norm.weight" in reader,
        norm_before_residual=_flag(raw, layer_raw, "norm_before_residual"),
        norm_output=_flag(raw, layer_raw, "norm_output"), **common,
    )  # fmt: skip
    for flag, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if _flag(raw, layer_raw, flag) and tensor not in reader:
            raise UserError(f"{folder} has no tensor {tensor}, and its config.json asks for {flag}")
    width = reader.shape("fc.weight")[-1]
    if width != config.feature_size:
        raise UserError(
            f"{folder}: fc.weight takes {width} channels, and {len(captured)} layers of the target have "
            f"{config.feature_size}"
        )
    return config, (
        f"EAGLE-3 ({form}), takes the inputs of layers {', '.join(map(str, captured))} of {target.num_layers} ({source}), "
        f"draft vocabulary {draft_vocab_size} of {target.vocab_size}, {own}"
    )


def _captured(raw: dict[str, Any], layer_raw: dict[str, Any], target: ModelConfig) -> tuple[tuple[int, ...], str]:
    """The layers whose input is taken. vLLM and speculators name inputs, at the top level; SGLang, SpecForge and NVIDIA name
    outputs, inside `eagle_config`. Files that name none follow the original."""
    n = target.num_layers
    inputs = raw.get(LAYER_IDS) or layer_raw.get(LAYER_IDS)
    outputs = (raw.get("eagle_config") or layer_raw.get("eagle_config") or {}).get(LAYER_IDS)
    if inputs:
        captured, source = tuple(inputs), "named as inputs"
    elif outputs:
        captured, source = tuple(i + 1 for i in outputs), "named as outputs of the layers before"
    else:
        captured, source = eagle3_layers(n), "by default"
    if any(type(i) is not int or not 0 <= i <= n for i in captured):
        raise UserError(f"the head takes the inputs of layers {captured} ({source}): the target has {n} layers")
    return captured, source


def _flag(raw: dict[str, Any], layer_raw: dict[str, Any], name: str) -> bool:
    nested = raw.get("eagle_config") or {}
    return bool(raw.get(name, layer_raw.get(name, nested.get(name, False))))


def _layer_config(raw: dict[str, Any], reader: _HeadReader, target: ModelConfig, folder: Path) -> ModelConfig:
    layer = "layers.0.self_attn."
    has_window = raw.get("use_sliding_window") or set(raw.get("layer_types") or ()) == {"sliding_attention"}
    config = ModelConfig(
        **layer_fields(raw, folder),
        num_layers=raw.get("num_hidden_layers", 1),
        max_position=target.max_position,  # what the file says is how long its training texts were, no limit
        qkv_bias=layer + "q_proj.bias" in reader,
        attention_output_bias=layer + "o_proj.bias" in reader,
        mlp_bias="layers.0.mlp.down_proj.bias" in reader,
        qk_norm=layer + "q_norm.weight" in reader,
        sliding_window=raw.get("sliding_window") if has_window else None,
    )
    return check_config(config, folder / "config.json")


def _check_tokenizer(folder: Path, raw: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Where the head says what vocabulary it was made for, that must be the target's."""
    given = raw.get(FINGERPRINT)
    if given is None and (folder / "tokenizer.json").is_file():
        given = vocabulary_fingerprint(Tokenizer(*read_tokenizer(folder)))
    if given is None:
        return
    ours = vocabulary_fingerprint(tokenizer)
    if given != ours:
        raise UserError(
            f"{folder} was made for another tokenizer: SHA-256 of its vocabulary {str(given)[:12]}, the target's {ours[:12]}"
        )
