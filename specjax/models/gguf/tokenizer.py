"""Build a tokenizer of the vocabulary in a GGUF file: byte-level BPE, or BPE as SentencePiece has it."""

from typing import TYPE_CHECKING, Any

from specjax.models.gguf.architectures import architecture_of
from specjax.models.gguf.header import Header
from specjax.validation.extras import needs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens
SPACE = "\u2581"  # which SentencePiece has in the place of a space
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SEED_CODER = QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
# Marks belong to their letters.
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Capitals begin a word.
_BEGIN, _REST = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = rf"{_BEGIN}*{_REST}+{_ENDING}|{_BEGIN}+{_REST}*{_ENDING}|\p{{N}}{{1,3}}{_OTHERS}"
TEKKEN = rf"{_BEGIN}*{_REST}+|{_BEGIN}+{_REST}*|\p{{N}}{_OTHERS}"
# Runs of Chinese characters are words of their own.
_NOT_HAN = r"&&[^\p{Han}]]"
KIMI = r"\p{Han}+|" + GPT4O.replace(r"\p{M}]", rf"\p{{M}}{_NOT_HAN}").replace(r"[\r\n/]", r"[\r\n]")
# These kinds have several patterns, of which each parts the words that the ones before it leave.
_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_V3 = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _WORDS
DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"
DEEPSEEK_LLM = (
    *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    *(r"\s+$", _CHINESE, r"\p{N}"),
)
AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # from the right
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _WORDS,
)
LAGUNA = r"[^\n]+|\n+", QWEN2
MINICPM5 = r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
OF_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0")
# The texts of these kinds have a token at the beginning unless a file says that they have none.
BEGUN = (*OF_LLAMA3, "tekken", "pixtral")
# Files with these kinds have tokens that no merge makes, which whole words are looked up in first.
WHOLE_WORDS = (*BEGUN, "minicpm5")
# The texts of these kinds are composed: a letter and its accent are one character.
OF_QWEN2 = ("qwen2", "deepseek-r1-qwen", "hunyuan", "megrez", "stablelm2")
COMPOSED = (*OF_QWEN2, "qwen35", "olmo", "mpt", "command-r")
SPLITS: dict[str, tuple[str, ...]] = dict.fromkeys((*OF_LLAMA3, "glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (LLAMA3,))
SPLITS |= dict.fromkeys((*OF_QWEN2, "grok-2", "kormo", "solar-open"), (QWEN2,))
SPLITS |= dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), (GPT4O,))
SPLITS |= dict.fromkeys(("tekken", "pixtral"), (TEKKEN,))
SPLITS |= dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK_V3)
SPLITS |= {"deepseek-coder": DEEPSEEK_CODER, "deepseek-llm": DEEPSEEK_LLM, "afmoe": AFMOE, "laguna": LAGUNA}
SPLITS |= {"qwen35": (QWEN35,), "seed-coder": (SEED_CODER,), "kimi-k2": (KIMI,), "minicpm5": MINICPM5}
# Kinds that take each digit by itself.
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
PLAIN = (
    *("gpt-2", "exaone4", "default", "phi-2", "olmo", "mpt", "gigachat", "a.x-4.0", "mellum", "trillion"),
    "granite-docling",
)


def tokenizer_of(header: Header) -> "Tokenizer":
    """Return the tokenizer of a file, which neither truncates nor pads.

    Raises:
        ModuleNotFoundError: the package tokenizers is not installed.
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    with needs("models"):
        import tokenizers  # noqa: F401
    model = _field(header, "model", str)
    if model not in ("gpt2", "llama", "gemma4"):
        raise ValueError(f"tokenizer.ggml.model in {header.path} must be 'gpt2', 'llama' or 'gemma4', got {model!r}")
    tokens = _field(header, "tokens", list)
    has_kinds = header.fields.get("tokenizer.ggml.token_type") is not None
    kinds = _field(header, "token_type", list) if has_kinds else [NORMAL] * len(tokens)
    if not all(isinstance(token, str) for token in tokens) or len(kinds) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens in {header.path} must be strings, each with a token_type, got {len(tokens)} tokens "
            f"and {len(kinds)} types"
        )
    tokenizer = _byte_level(header, tokens) if model == "gpt2" else _sentence_piece(header, tokens, kinds)
    _add_tokens(tokenizer, tokens, kinds)
    # Gemma 4 needs a token at the beginning, although its early files say that texts have none.
    starts = model == "gemma4" or header.fields.get(
        "tokenizer.ggml.add_bos_token", model == "llama" or header.fields.get("tokenizer.ggml.pre") in BEGUN
    )
    _add_ends(tokenizer, header, tokens, bool(starts))
    return tokenizer


def _field(header: Header, name: str, kind: type) -> Any:
    value = header.fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise ValueError(
            f"tokenizer.ggml.{name} in {header.path} must be {kind.__name__}, got "
            f"{'no such field' if value is None else type(value).__name__}"
        )
    return value


def _byte_level(header: Header, tokens: list[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = _stored_merges(header)
    pre = header.fields.get("tokenizer.ggml.pre", "default")
    if not (isinstance(pre, str) and (pre in SPLITS or pre in DIGITS or pre in PLAIN)):
        known = ", ".join([*SPLITS, *DIGITS, *PLAIN])
        raise ValueError(f"tokenizer.ggml.pre in {header.path} must be one of {known}, got {pre!r}")
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre in WHOLE_WORDS))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"tokenizer.ggml.merges in {header.path} must be pairs of tokens: {error}") from error
    if pre in SPLITS:
        splits: list[Any] = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in SPLITS[pre]]
        then = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, then])
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(header: Header) -> list[tuple[str, str]]:
    """Return the pairs of tokens that the file says make a token, the first one first."""
    merges = [str(merge).split(" ") for merge in _field(header, "merges", list)]
    if any(len(pair) != 2 for pair in merges):
        raise ValueError(f"tokenizer.ggml.merges in {header.path} must be pairs of tokens with a space between them")
    return [(first, second) for first, second in merges]


def _sentence_piece(header: Header, tokens: list[str], kinds: list[int]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _field(header, "scores", list)
    has_merges = header.fields.get("tokenizer.ggml.model") == "gemma4"
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores in {header.path} must be {len(tokens)}, got {len(scores)}")
    if architecture_of(header).has_ordered_tokens:
        # The scores of Gemma do not follow the order of its merges, and runs of spaces are stored as such.
        scores = range(0, -len(tokens), -1)
        tokens = [token.replace(" ", SPACE) if not token.strip() else token for token in tokens]
    ids = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    each = zip(tokens, scores, kinds, strict=True)
    scored: list[tuple[str, float]] = [(token, score) for token, score, kind in each if kind in (NORMAL, USER_DEFINED)]
    pairs = _stored_merges(header) if has_merges else _merges(ids, scored)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace: list[Any] = [normalizers.Replace(" ", SPACE)]
    decode: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.fields.get("tokenizer.ggml.add_space_prefix", True):
        replace.insert(0, normalizers.Prepend(SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(replace), decoders.Sequence(decode)
    return tokenizer


def _merges(ids: dict[str, int], scored: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, the one with the best score first."""
    found = []
    for token, score in scored:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        found += [(score, pair) for pair in sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    found.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
    return [pair for _, pair in found]


def _add_tokens(tokenizer: "Tokenizer", tokens: list[str], kinds: list[int]) -> None:
    """Let tokens of control, and those that users defined, be found whole in a text."""
    from tokenizers import AddedToken

    def of(kind: int) -> list[str]:
        return [token for token, found in zip(tokens, kinds, strict=True) if found == kind and token]

    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in of(CONTROL)])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in of(USER_DEFINED)])


def _add_ends(tokenizer: "Tokenizer", header: Header, tokens: list[str], starts: bool) -> None:
    """Let the tokenizer put a token before a text if it `starts`, and one after it if the file asks for that."""
    from tokenizers import processors

    template, special = ["$A"], []
    for name, is_added, place in (("bos", starts, 0), ("eos", header.fields.get("tokenizer.ggml.add_eos_token"), 2)):
        i = header.fields.get(f"tokenizer.ggml.{name}_token_id")
        if is_added and type(i) is int and 0 <= i < len(tokens):
            template.insert(place, tokens[i])
            special.append((tokens[i], i))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
