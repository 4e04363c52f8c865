"""What a model, a draft, a cache and an engine are, as frozen values that check themselves."""

from dataclasses import dataclass, replace

from .errors import UserError

MAX_DRAFT_TOKENS = 16
MAX_NUM_SEQS = 4096
_DEFAULT_MODEL_LEN = 8192
MAX_LOGPROBS = 20  # of the best tokens, as in the OpenAI API and vLLM
NGRAM_MIN_BESIDE_HEAD = 2  # a match of a single token is right less often than a head's first draft
KV_CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent RoPE scaling of Llama 3.1 and later (`rope_type: llama3` in Hugging Face configs)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearRopeScaling:
    """Every position is divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True)
class RopeFactors:
    """Each frequency is divided by its own factor, `hd / 2` of them (GGUF's `rope_freqs.weight`)."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | LinearRopeScaling | RopeFactors


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the Llama family. Llama, Mistral, Qwen2 and Qwen3 differ in these fields only."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    has_kv_scales: bool = False  # calibrated scales for a float8 cache
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd: rotary embeddings need an even one")

    def model_len(self, asked: int | None) -> int:
        """The longest prompt and answer together: as asked, or by default the model's own limit, at most 8192. Raises
        UserError for more than the model can take."""
        if asked is None:
            return min(self.max_position, _DEFAULT_MODEL_LEN)
        if asked > self.max_position:
            raise UserError(f"max_model_len is {asked}: this model was trained for at most {self.max_position} tokens")
        return asked

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input an EAGLE-3 head takes where nothing is said: low, middle and high."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class EagleConfig:
    """One EAGLE draft head. `layer` is the shape of its decoder layers, its vocabulary that of the target.

    `captured` are the target's layers whose INPUT the head takes, 0 being the embeddings and `num_layers` what comes out of
    the last one; an EAGLE-1 head takes the normed hidden states instead. The flags are those of the `speculators` format.
    """

    version: int  # 1 or 3
    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    captured: tuple[int, ...] = ()
    has_embedding: bool = False
    has_target_ids: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @classmethod
    def for_target(cls, target: ModelConfig, draft_vocab_size: int) -> "EagleConfig":
        """An EAGLE-3 head of one Llama layer of the target's own sizes, over the three layers that it takes by default."""
        n = target.num_layers
        if n < 6:
            raise UserError(f"the target has {n} layers: a head takes the hidden states of three of at least 6")
        if not 1 <= draft_vocab_size <= target.vocab_size:
            raise UserError(f"draft_vocab_size is {draft_vocab_size}: allowed are 1 to {target.vocab_size}")
        return cls(
            version=3, layer=cls.llama_layer(target), target_hidden_size=target.hidden_size,
            draft_vocab_size=draft_vocab_size, captured=eagle3_layers(n), has_target_ids=True,
        )  # fmt: skip

    @staticmethod
    def llama_layer(shape: ModelConfig) -> ModelConfig:
        """One plain Llama layer of the same sizes."""
        return replace(
            shape, num_layers=1, qkv_bias=False, attention_output_bias=False, mlp_bias=False, qk_norm=False,
            tie_word_embeddings=False, sliding_window=None, has_kv_scales=False,
        )  # fmt: skip

    @property
    def feature_size(self) -> int:
        """Channels of the target that one position takes."""
        return max(len(self.captured), 1) * self.target_hidden_size


@dataclass(frozen=True)
class DraftConfig:
    """Who proposes, and how many tokens per round.

    `num_tokens` 0 is plain decoding. `schedule` is how many of them where more sequences run at once: pairs (most sequences,
    tokens), ascending; beyond the last pair there are no drafts, and without pairs always `num_tokens`.
    `ngram_min .. ngram_max` is the length of the suffix that must have occurred before;
    `ngram_max` 0 is no n-grams. Where no suffix did, a `head` proposes, if there is one; its chain ends where by its own
    word all of it is right with a probability below `min_confidence`.
    """

    num_tokens: int = 5
    ngram_min: int = 1
    ngram_max: int = 3
    head: EagleConfig | None = None
    min_confidence: float = 0.0
    schedule: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise UserError(f"num_draft_tokens is {self.num_tokens}: allowed are 0 (no drafts) to {MAX_DRAFT_TOKENS}")
        sizes = [size for size, _ in self.schedule]
        if sizes != sorted(set(sizes)) or any(size < 1 or not 0 <= k <= self.num_tokens for size, k in self.schedule):
            raise UserError(
                f"draft schedule {self.schedule} cannot be used: it takes pairs (most sequences, drafts), the sequences "
                f"ascending, and 0 to {self.num_tokens} drafts"
            )
        if not 0 <= self.min_confidence <= 1:
            raise UserError(f"min_draft_confidence is {self.min_confidence}: allowed are 0 (always all drafts) to 1")
        if self.ngram_max and not 1 <= self.ngram_min <= self.ngram_max:
            raise UserError(f"n-gram lengths {self.ngram_min}..{self.ngram_max}: need 1 <= min <= max")

    @classmethod
    def create(
        cls,
        num_draft_tokens: int,
        *,
        uses_ngrams: bool,
        head: EagleConfig | None,
        min_confidence: float = 0.0,
        schedule: tuple[tuple[int, int], ...] = (),
    ) -> "DraftConfig":
        """Beside a head, n-grams propose only where the match is long. `num_draft_tokens` 0 is no drafts, and the most that
        `schedule` gives."""
        config = cls(num_tokens=num_draft_tokens, min_confidence=min_confidence)
        if num_draft_tokens == 0 or (head is None and not uses_ngrams):
            return cls(num_tokens=0)
        config = replace(config, schedule=tuple((size, min(k, num_draft_tokens)) for size, k in schedule))
        if head is None:
            return config
        ngram_max = config.ngram_max if uses_ngrams else 0
        return replace(config, head=head, ngram_min=NGRAM_MIN_BESIDE_HEAD, ngram_max=ngram_max)

    def at_load(self, num_seqs: int) -> "DraftConfig":
        """What drafts `num_seqs` sequences at once."""
        if not self.schedule:
            return self
        tokens = next((k for size, k in self.schedule if num_seqs <= size), 0)
        return replace(self, num_tokens=tokens, schedule=())


def default_schedule(platform: str, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """How many drafts pay where more sequences run at once, as `DraftConfig.schedule`.

    A CPU is busy with few rows: measured with n-grams (`benchmarks/draft_schedule.py`), five drafts run 0.77 x as fast as
    none at four sequences, two 1.00 x; at eight, 0.65 x and 0.70 x. On a GPU the pass waits for memory up to many rows;
    there the numbers follow what is published for EAGLE-3 chains on Hopper (vLLM, SGLang) and are not measured here.
    """
    pairs = ((2, num_tokens), (4, 2)) if platform == "cpu" else ((32, num_tokens), (64, 3))
    return tuple((size, min(k, num_tokens)) for size, k in pairs)


def default_min_confidence(platform: str) -> float:
    """`DraftConfig.min_confidence` where none is given. A CPU is slowed by each pass of a head; a GPU, where drafts are
    cheap and a program without branches is better, always drafts all."""
    return 0.25 if platform == "cpu" else 0.0


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. All array shapes follow from these, so they are fixed for its life.

    `num_kv_tokens` is the room of the cache in tokens, over all sequences. `page_size` None is 64 tokens on GPUs, 16
    elsewhere. `kv_cache_dtype` "auto" is the dtype of the model, "fp8" float8 e4m3 with a scale per token and head.
    `rounds_per_burst` is how many rounds the device runs before the host looks again; fewer rounds stream more smoothly.
    `max_bad_words` counts forbidden sequences of two to `max_bad_word_tokens` tokens; single tokens are not limited.
    """

    max_model_len: int
    max_num_seqs: int = 8
    num_kv_tokens: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str = "auto"
    max_stop_ids: int = 16
    max_bad_words: int = 64
    max_bad_word_tokens: int = 8
    rounds_per_burst: int = 8
    rounds_per_burst_streaming: int = 2
    prefill_chunks: tuple[int, ...] = (16, 64, 256)
    min_context_bucket: int = 256

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise UserError(f"max_model_len is {self.max_model_len}: it must hold a prompt and an answer, at least 2")
        if not 1 <= self.max_num_seqs <= MAX_NUM_SEQS:
            raise UserError(f"max_num_seqs is {self.max_num_seqs}: allowed are 1 to {MAX_NUM_SEQS}")
        for name in (
            "page_size", "max_stop_ids", "max_bad_words", "rounds_per_burst", "rounds_per_burst_streaming",
            "min_context_bucket",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: allowed is an integer >= 1")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UserError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} is unknown: allowed are {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.max_bad_word_tokens < 2:
            raise UserError(f"max_bad_word_tokens is {self.max_bad_word_tokens}: allowed is an integer >= 2")
        if not self.prefill_chunks or list(self.prefill_chunks) != sorted(set(self.prefill_chunks)):
            raise UserError(f"prefill_chunks is {self.prefill_chunks}: allowed are sizes in ascending order")
        if self.num_kv_tokens is not None and self.num_kv_tokens < (self.page_size or 1):
            raise UserError(
                f"num_kv_tokens is {self.num_kv_tokens}: at least one page of {self.page_size or 1} must fit"
            )
