"""Pairs of checkpoints: the OPT walk-through end to end, and targets and drafts that differ in all but their tokens."""

import json

import numpy as np
import pytest
from families import CONFIGS, OPT, make_tensor, shapes, write
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specjax import LLM, SamplingParams

pytestmark = pytest.mark.slow  # text of whole pairs of checkpoints; the loop is tested in test_decode.py

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def save_tokenizer(directory, num_tokens):
    """A tokenizer of the words t0, t1, ..."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(num_tokens)}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


class TestWalkThrough:
    """Target and draft of OPT's vocabulary that say given tokens by their positions, whatever was before."""

    VOCAB_SIZE = 50272
    PROMPT = (2, 29631, 10, 527, 9, 410, 1211, 32280, 14604, 4, 280)
    DRAFTS = (16, 5, 129, 86, 939)
    TARGET = (16, 5, 129, 2949, 655, 40, 2)

    def write(self, directory, *, hidden, num_layers, says):
        directory.mkdir()
        config = OPT | {"model_type": "opt", "vocab_size": self.VOCAB_SIZE, "hidden_size": hidden}
        config |= {"num_hidden_layers": num_layers, "word_embed_proj_dim": hidden}
        (directory / "config.json").write_text(json.dumps(config))
        rng = np.random.default_rng(0)
        embedding = rng.normal(size=(self.VOCAB_SIZE, hidden))
        embedding *= 8 / np.linalg.norm(embedding, axis=1, keepdims=True)
        positions = np.zeros((OPT["max_position_embeddings"] + 2, hidden))
        first = len(self.PROMPT) - 1 + 2
        positions[first : first + len(says)] = 100 * embedding[list(says)]
        tensors = {
            "model.decoder.embed_tokens.weight": embedding.astype(np.float32),
            "model.decoder.embed_positions.weight": positions.astype(np.float32),
        }
        for name in shapes("opt"):
            i = int(name.split("layers.")[1].split(".")[0]) if ".layers." in name else 0
            if name not in tensors and i < num_layers:
                shape = tuple({32: hidden}.get(size, size) for size in shapes("opt")[name])
                scale = 1 if "norm" in name else 0.1
                tensors[name] = scale * make_tensor(name, shape)
        save_file(tensors, directory / "model.safetensors")
        save_tokenizer(directory, self.VOCAB_SIZE)
        return directory

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("opt")
        target = cls.write(cls, directory / "target", hidden=48, num_layers=2, says=cls.TARGET)
        draft = cls.write(cls, directory / "draft", hidden=24, num_layers=1, says=cls.DRAFTS)
        return LLM(target, draft, num_draft_tokens=5)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_generation(self, llm, temperature):
        """Three drafts are accepted, the fourth rejected and replaced, the fifth dropped; then on to the end."""
        stream = llm.stream(self.PROMPT, SamplingParams(temperature=temperature, top_p=0.95, seed=0, max_tokens=16))
        pieces = [next(stream) for _ in range(4)]
        assert [piece.token_id for piece in pieces] == [16, 5, 129, 2949]
        assert [piece.kind for piece in pieces] == ["accepted", "accepted", "accepted", "recovered"]
        assert (stream.result.metrics.num_drafted, stream.result.metrics.num_accepted) == (5, 3)

        pieces += list(stream)
        assert tuple(piece.token_id for piece in pieces) == self.TARGET
        assert stream.result.completions[0].finish_reason == "stop"
        assert stream.result.text.split() == ["t16", "t5", "t129", "t2949", "t655", "t40", "t2"]


class TestDifferentModels:
    """OPT as the target and Qwen3 as the draft, whose embedding is padded and whose limit is lower."""

    PROMPTS = ("t5 t6 t7", "t9", "t10 t11 t12 t13 t14 t15 t16 t17", "t5 t6 t7 " * 9)
    LIMIT = 24  # of the draft; the last prompt is longer

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("pair")
        target, draft = write(directory / "target", "opt_post_norm"), directory / "draft"
        draft.mkdir()
        config = CONFIGS["qwen3"] | {"vocab_size": 70, "max_position_embeddings": cls.LIMIT}
        (draft / "config.json").write_text(json.dumps(config))
        padded = {name: (70, 32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        tensors = {name: make_tensor(name, shape) for name, shape in (shapes("qwen3") | padded).items()}
        save_file(tensors, draft / "model.safetensors")
        for each in (target, draft):
            save_tokenizer(each, 60)
        return target, draft

    def test_greedy_is_plain(self, pair):
        llm = LLM(*pair, num_draft_tokens=3)
        assert llm.max_length == 64
        results, plain = llm.generate(self.PROMPTS, GREEDY), llm.plain().generate(self.PROMPTS, GREEDY)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        assert results[-1].metrics.num_drafted == 0
        for prompt, result in zip(self.PROMPTS[:-1], results, strict=False):
            drafting = self.LIMIT - 3 - len(prompt.split())  # steps at most, of one token each
            assert 0 < result.metrics.num_drafted <= 3 * drafting
            assert result.metrics.num_steps > result.metrics.num_drafted / 3

    def test_max_length(self, pair):
        llm = LLM(*pair, max_length=16)
        assert (llm.max_length, llm.proposer.max_length) == (16, self.LIMIT)
        with pytest.raises(ValueError, match=r"max_length must be in \[2, 64\], the model's limit, got 65"):
            LLM(*pair, max_length=65)

    def test_tokenizers_differ(self, pair, tmp_path):
        other = write(tmp_path / "other", "llama")
        save_tokenizer(other, 61)
        with pytest.raises(ValueError, match="the token 't60' has the id None, got 60"):
            LLM(pair[0], other)
