"""Text of token ids, without a model: whole characters, stop strings, special tokens."""

import numpy as np
import pytest
from test_llm import BOS, EOS, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specjax.engine.detokenizer import INCOMPLETE, Detokenizer
from specjax.sampling import SamplingParams


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def run(tokenizer, ids, rng, prompt=(0,), **options):
    """Feed ids in random chunks, take the certain text after each: the output and its pieces."""
    output = Detokenizer(tokenizer, list(prompt), SamplingParams(max_tokens=1000, **options))
    pieces = []
    while ids and output.finish_reason is None:
        size = rng.integers(1, 9)
        output.extend(ids[:size])
        ids = ids[size:]
        if not ids and output.finish_reason is None:
            output.finish(False, ())
        pieces += [output.text(i, i + 1) for i in range(len(pieces), output.num_certain)]
    assert len(pieces) == len(output.token_ids)
    return output, pieces


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


class TestCharacters:
    def test_any_ids(self, tokenizer):
        rng = np.random.default_rng(0)
        for _ in range(100):
            ids = rng.integers(0, 300, rng.integers(1, 40)).tolist()
            output, pieces = run(tokenizer, ids, rng, stop="\ufffd\ufffd\ufffd\ufffdnever")
            assert output.token_ids == ids
            assert "".join(pieces) == tokenizer.decode(ids)

    @pytest.mark.slow
    def test_ten_thousand_prompts_of_odd_bytes(self, tokenizer):
        """Text that a person may paste: as a prompt, and said back token by token."""
        rng = np.random.default_rng(1)
        for i in range(10_000):
            odd = rng.integers(0, 256, rng.integers(1, 16), np.uint8).tobytes()
            text = odd.decode("latin-1") if i % 2 else odd.decode("utf-8", errors="replace")
            ids = encode(tokenizer, text)
            output = Detokenizer(tokenizer, tokenizer.encode(text).ids, SamplingParams(max_tokens=100))
            for j, token in enumerate(ids):
                output.extend([token])
                piece = output.text(0, output.num_certain)
                assert text.startswith(piece), "half a character was given"
                assert len(piece) == len(text) or j < len(ids) - 1 or text.endswith(INCOMPLETE)
            output.finish(False, ())
            assert output.text(0, len(ids)) == text

    def test_bytes_of_their_own(self):
        """Tokenizers of the Llama 2 kind fall back to tokens of single bytes."""
        vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"\u2581": 257, "a": 258}
        tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        rng = np.random.default_rng(2)
        text = "a 東京 é🚀aa a"
        _, pieces = run(tokenizer, encode(tokenizer, text), rng, prompt=[258])
        assert "".join(pieces) == text
        assert [piece for piece in pieces if piece] == [*text]
        for _ in range(300):
            run(tokenizer, rng.integers(1, 259, rng.integers(1, 30)).tolist(), rng, prompt=[258])

    def test_space_after_the_prompt(self):
        words = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581cat": 1, "\u2581sat": 2}, unk_token="\u2581the"))
        words.decoder = decoders.Metaspace()
        _, pieces = run(words, [1, 2], np.random.default_rng(0))
        assert pieces == [" cat", " sat"]

    def test_without_text(self, tokenizer):
        ids = encode(tokenizer, "the 東 cat")
        output, pieces = run(tokenizer, ids, np.random.default_rng(0), detokenize=False)
        assert output.token_ids == ids
        assert pieces == [""] * len(ids)
        assert output.finish_reason == "length"


class TestStopStrings:
    @pytest.mark.parametrize("is_included", [False, True])
    def test_split_over_tokens(self, tokenizer, is_included):
        rng = np.random.default_rng(1)
        for _ in range(300):
            text = "".join(rng.choice([*"ab 東é🚀", "the", " END"], 30))
            start = rng.integers(0, len(text) - 6)
            stop = text[start : start + rng.integers(1, 6)]
            ids = encode(tokenizer, text)
            output, pieces = run(tokenizer, ids, rng, stop=[stop, "never"], include_stop_str_in_output=is_included)
            kept = text[: text.index(stop) + is_included * len(stop)]
            covering = next(n for n in range(len(ids) + 1) if tokenizer.decode(ids[:n]).startswith(kept))
            assert "".join(pieces) == kept
            assert output.token_ids == ids[:covering]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    @pytest.mark.parametrize("stop", [["e", "t"], ["t", "e"], ["he", "th", "t"]])
    def test_the_earliest_counts(self, tokenizer, stop):
        """Where one token completes several."""
        ids = encode(tokenizer, "a") + encode(tokenizer, "the")
        assert len(ids) == 2
        output = Detokenizer(tokenizer, [0], SamplingParams(stop=stop))
        output.extend(ids)
        assert output.text(0, len(output.token_ids)) == "a" and output.stop_reason == "t"

    def test_bytes_whose_text_is_held_back(self, tokenizer):
        """An odd byte has its text with the next token, so it is not certain before that token is."""
        odd = next(i for i in range(300) if tokenizer.decode([i]) == INCOMPLETE)
        ids = [*encode(tokenizer, "x"), odd, *encode(tokenizer, "F"), *encode(tokenizer, "z")]
        output = Detokenizer(tokenizer, [0], SamplingParams(max_tokens=100, stop="Fb"))
        found = []
        for token in ids:
            output.extend([token])
            found.append(output.num_certain)
        assert found == [1, 1, 1, 4] and output.text(0, 4) == "x\ufffdFz"

    def test_what_is_included_is_not_held_back(self, tokenizer):
        for is_included, expected in ((False, ""), (True, "th")):
            params = SamplingParams(stop="thx", include_stop_str_in_output=is_included)
            output = Detokenizer(tokenizer, [0], params)
            output.extend(encode(tokenizer, "t") + encode(tokenizer, "h"))
            assert output.text(0, output.num_certain) == expected

    def test_min_tokens(self, tokenizer):
        output = Detokenizer(tokenizer, [0], SamplingParams(stop="ab", min_tokens=3, max_tokens=9))
        output.extend(encode(tokenizer, "ababab"))
        assert output.text(0, len(output.token_ids)) == "abab"


class TestSpecialTokens:
    IDS = (0, "the cat", 1, 0, " sat", 1)

    @pytest.mark.parametrize(
        "options, expected",
        [
            ({}, "the cat sat"),
            ({"skip_special_tokens": False}, f"{BOS} the cat {EOS} {BOS} sat {EOS}"),
            (
                {"skip_special_tokens": False, "spaces_between_special_tokens": False},
                f"{BOS}the cat{EOS}{BOS} sat{EOS}",
            ),
        ],
    )
    def test_text(self, tokenizer, options, expected):
        ids = [id for part in self.IDS for id in (encode(tokenizer, part) if isinstance(part, str) else [part])]
        for seed in range(20):
            _, pieces = run(tokenizer, ids, np.random.default_rng(seed), prompt=(5,), **options)
            assert "".join(pieces) == expected

    def test_in_a_stop_string(self, tokenizer):
        ids = [*encode(tokenizer, "the"), 1, *encode(tokenizer, "cat")]
        output, _ = run(tokenizer, ids, np.random.default_rng(0), skip_special_tokens=False, stop=f"e {EOS} c")
        assert (output.text(0, len(output.token_ids)), output.finish_reason) == ("th", "stop")
