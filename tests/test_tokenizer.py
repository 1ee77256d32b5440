"""The tokenizer of a checkpoint in every format, its end-of-sequence tokens, and whether two are the same."""

import json
import re
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.models.directory import Checkpoint
from specjax.models.vocabulary import check_same_vocabulary
from specjax.validation.extras import install_command

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with the special tokens of OPT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 4, trainer)
    return tokenizer


def write_json(path, content):
    path.write_text(json.dumps(content))


class TestFormats:
    def test_json_in_the_directory_or_beside_it(self, tmp_path):
        directory = tmp_path / "target"
        directory.mkdir()
        make_tokenizer().save(str(tmp_path / "tokenizer.json"))
        assert Checkpoint(directory).tokenizer().get_vocab_size() > 256
        small = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        small.enable_truncation(1)
        small.enable_padding(length=5)
        small.save(str(directory / "tokenizer.json"))
        tokenizer = Checkpoint(directory).tokenizer()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        assert tokenizer.encode("a b a").ids == [0, 1, 0]

    def test_damaged(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer.json must be a tokenizer of the tokenizers library"):
            Checkpoint(tmp_path).tokenizer()

    def test_other_format_without_transformers(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        make_tokenizer().model.save(str(tmp_path))
        message = f"to read vocab.json, install transformers: {install_command('hf', 'transformers')}"
        with pytest.raises(ValueError, match=re.escape(message)):
            Checkpoint(tmp_path).tokenizer()

    @pytest.mark.slow
    def test_other_format(self, tmp_path):
        """vocab.json and merges.txt, as OPT has them: text begins with </s>."""
        pytest.importorskip("transformers")
        expected = make_tokenizer()
        expected.model.save(str(tmp_path))
        write_json(tmp_path / "config.json", {"model_type": "opt"})
        special = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
        write_json(
            tmp_path / "tokenizer_config.json", special | {"add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
        )
        tokenizer = Checkpoint(tmp_path).tokenizer()
        assert tokenizer.encode("the cat, é").ids == [2, *expected.encode("the cat, é").ids]
        assert tokenizer.decode(tokenizer.encode("the cat, é").ids) == "the cat, é"

    @pytest.mark.slow
    def test_damaged_other_format(self, tmp_path):
        pytest.importorskip("transformers")
        (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
        write_json(tmp_path / "config.json", {"model_type": "llama"})
        with pytest.raises(ValueError, match=r"tokenizer.model must be a tokenizer that transformers can convert"):
            Checkpoint(tmp_path).tokenizer()


class TestEndOfSequence:
    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, ()),
            ({"config": {"eos_token_id": None}}, ()),
            ({"config": {"eos_token_id": 7}}, (7,)),
            ({"config": {"eos_token_id": [7, 8]}}, (7, 8)),
            ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 8]}}, (9, 8)),
            ({"config": {"eos_token_id": 7}, "generation_config": {}}, (7,)),
            ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "</s>"}}, (7, 2)),
            ({"generation_config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": {"content": "</s>"}}}, (2,)),
            ({"tokenizer_config": {"eos_token": None}}, ()),
            ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (2,)),
            ({"config": {"text_config": {"eos_token_id": [7, 8]}}}, (7, 8)),
            ({"config": {"eos_token_id": 9, "text_config": {"eos_token_id": 7}}}, (9,)),
        ],
    )
    def test_ids(self, tmp_path, files, expected):
        for name, content in files.items():
            write_json(tmp_path / f"{name}.json", content)
        make_tokenizer().save(str(tmp_path / "tokenizer.json"))
        assert Checkpoint(tmp_path).eos_token_ids(300) == expected

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            (
                "config",
                {"eos_token_id": "</s>"},
                r"in .*config.json must be a token id in \[0, vocab_size = 300\) or",
            ),
            ("generation_config", {"eos_token_id": [1, -1]}, "eos_token_id in .*generation_config.json must be"),
            ("config", {"eos_token_id": [1, 300]}, r"eos_token_id in .*config.json must be .* got \[1, 300\]"),
            ("generation_config", [], "generation_config.json must hold a JSON object"),
            ("tokenizer_config", {"eos_token": 2}, "eos_token in .*tokenizer_config.json must be str, got 2"),
            ("tokenizer_config", {"eos_token": {}}, "must have the field eos_token.content"),
            ("tokenizer_config", {"eos_token": "<end>"}, "must be a token of the tokenizer .*, got '<end>'"),
        ],
    )
    def test_damaged(self, tmp_path, name, content, match):
        write_json(tmp_path / f"{name}.json", content)
        make_tokenizer().save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=match):
            Checkpoint(tmp_path).eos_token_ids(300)


@pytest.mark.parametrize(
    ("draft", "match"),
    [
        ({"a": 0, "b": 1, "c": 3}, "the token 'c' has the id 2, got 3"),
        ({"a": 0, "c": 1, "b": 2}, "the token '[bc]' has the id"),
        ({"a": 0, "b": 1}, "the token 'c' has the id 2, got None"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "the token 'd' has the id None, got 3"),
    ],
)
def test_vocabularies_must_be_the_same(draft, match):
    target = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}))
    check_same_vocabulary(target, Tokenizer(models.WordLevel({"c": 2, "b": 1, "a": 0})))
    with pytest.raises(ValueError, match=f"draft must have the vocabulary of the target, in which {match}"):
        check_same_vocabulary(target, Tokenizer(models.WordLevel(draft)))
