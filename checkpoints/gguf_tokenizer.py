"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from spec_jax.errors import UserError

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

# How the byte-level models split text before merging (`tokenizer.ggml.pre`): one digit or up to three at a time, and
# which runs of letters, marks and spaces stay together. Several patterns split one after the other.
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SPLITS = {
    "gpt-2": (_GPT2,),
    "default": _DEFAULT,
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
_LLAMA3_SPLITS = ("llama-bpe", "llama3")


def build_tokenizer(metadata: dict[str, Any], path: object) -> Backend:
    """A `tokenizers.Tokenizer` with the same ids as the model's own, from `tokenizer.ggml.*`.

    Raises UserError for tokenizer models other than `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE), and for
    byte-level splits that are not known here: a wrong split would give wrong ids in silence.
    """
    try:
        return _build(metadata, path)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path}: its tokenizer is incomplete or damaged: {error}") from None


def _build(metadata: dict[str, Any], path: object) -> Backend:
    model = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise UserError(f"{path} holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if model == "gpt2":
        backend = _byte_level(metadata, tokens, path)
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise UserError(f"{path}: tokenizer model {model!r} is not supported; supported: gpt2, llama")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    begins = model == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_SPLITS  # where the file does not say
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and bos is not None:
        backend.post_processor = processors.Sequence([
            *([processors.ByteLevel(trim_offsets=False)] if model == "gpt2" else []),
            processors.TemplateProcessing(single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]),
        ])  # fmt: skip
    return backend


def _byte_level(metadata: dict[str, Any], tokens: list[str], path: object) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UserError(f"{path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_SPLITS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_SPLITS))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Backend:
    """SentencePiece BPE has scores instead of merges: any split of a piece into two pieces is a merge of its score."""
    scores = metadata["tokenizer.ggml.scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        (scores[i], token[:cut], token[cut:])
        for token, i in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], vocabulary[merge[1]], vocabulary[merge[2]]))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(
        models.BPE(vocabulary, [m[1:] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")]
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend
