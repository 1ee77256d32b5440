"""Text in, text out, on checkpoints made here: a random pair, and a model that greedily says one given sentence."""

import copy
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from compilations import Compilations
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specjax import proposers, verifiers
from specjax.engine import run, slots
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.engine import Engine
from specjax.engine.llm import LLM, Completion, GenerationError, Piece
from specjax.engine.scheduler import NoTokenError
from specjax.models import load
from specjax.sampling import SamplingParams, guided

BOS, EOS = "<s>", "</s>"
MAX_LENGTH = 192
SENTENCE = "go東京é🚀, END of it"  # bytes of its characters outside ASCII are tokens of their own, none twice
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["the cat sat", "a", "on the mat the cat sat and the dog ran"]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with few merges; encoding puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "the dog ran to the end of the END"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def write_checkpoint(directory, tensors, *, num_layers=2, hidden=32, vocab_size=300, **fields):
    """A Hugging Face directory with the given tensors, a config that fits them, and a tokenizer."""
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | fields))
    save_file(tensors, directory / "model.safetensors")
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def random_tensors(seed, *, num_layers=2, hidden=32, vocab_size=300):
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (vocab_size, hidden), "lm_head": (vocab_size, hidden), "model.norm": (hidden,)}
    for i in range(num_layers):
        name = f"model.layers.{i}"
        shapes |= {
            f"{name}.input_layernorm": (hidden,),
            f"{name}.self_attn.q_proj": (hidden, hidden),
            f"{name}.self_attn.k_proj": (hidden // 2, hidden),
            f"{name}.self_attn.v_proj": (hidden // 2, hidden),
            f"{name}.self_attn.o_proj": (hidden, hidden),
            f"{name}.post_attention_layernorm": (hidden,),
            f"{name}.mlp.gate_proj": (48, hidden),
            f"{name}.mlp.up_proj": (48, hidden),
            f"{name}.mlp.down_proj": (hidden, 48),
        }
    draw = {name: rng.normal(0, 0.3, shape) if len(shape) == 2 else np.ones(shape) for name, shape in shapes.items()}
    return {f"{name}.weight": values.astype(np.float32) for name, values in draw.items()}


def chain_tensors(ids, vocab_size=300):
    """Weights of a model without depth, whose most likely token after ids[i] is ids[i + 1] by far."""
    assert len(set(ids)) == len(ids)
    tensors = random_tensors(0, num_layers=1, hidden=128, vocab_size=vocab_size)
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values[:] = 0
    embedding = np.sign(tensors["model.embed_tokens.weight"])
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"][:] = 0
    tensors["lm_head.weight"][ids[1:]] = embedding[ids[:-1]]
    return tensors


def write_pair(directory, num_layers=2, seed=0, **fields):
    """A random target, and a draft that is the target with noise, so that some drafts are accepted."""
    target, noise = (random_tensors(each, num_layers=num_layers) for each in (seed, seed + 1))
    draft = {name: (target[name] + 0.1 * noise[name]).astype(np.float32) for name in target}
    return [
        write_checkpoint(directory / name, tensors, num_layers=num_layers, **fields)
        for name, tensors in (("target", target), ("draft", draft))
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), num_layers=1, seed=2)


@pytest.fixture(scope="module")
def llm(pair):
    return LLM(*pair)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """An LLM that goes on after the first token of SENTENCE with the rest of it and EOS, and drafts it all."""
    ids = [*make_tokenizer().encode(SENTENCE, add_special_tokens=False).ids, 1]
    directory = tmp_path_factory.mktemp("chain") / "model"
    write_checkpoint(directory, chain_tensors(ids), num_layers=1, hidden=128)
    llm = LLM(directory, directory, num_draft_tokens=3)
    llm.sentence_ids = ids
    return llm


def say(llm, **options):
    """The result of the first token of the sentence."""
    return llm.generate([llm.sentence_ids[:1]], SamplingParams(**{"temperature": 0, "max_tokens": 40} | options))[0]


def texts(results):
    return [result.text for result in results]


def tokens(results):
    return [result.token_ids for result in results]


def test_a_prompt_ends_alone_where_no_token_can_follow(chain):
    """A token of the sentence has an embedding of NaN, and so no finite logit after it."""
    ids, broken = chain.sentence_ids, chain.plain()
    embedding = broken.model.params["embedding"].at[ids[3]].set(np.nan)
    target = replace(broken.model, params=broken.model.params | {"embedding": embedding})
    broken.setup = replace(broken.setup, model=target)
    message = r"prompts\[1\]: the model gave no finite logit for the token after 4 tokens, or the parameters of the"
    with pytest.raises(GenerationError, match=message) as caught:
        broken.generate([ids[5:6], ids[:1]], SamplingParams(temperature=0, max_tokens=40))
    result, missing = caught.value.results
    assert result.token_ids == ids[6:] and missing is None and list(caught.value.errors) == [1]
    stream = broken.stream(ids[:1], SamplingParams(temperature=0, max_tokens=40))
    with pytest.raises(NoTokenError, match="no finite logit"):
        list(stream)


class TestGenerate:
    @pytest.mark.slow
    def test_greedy_batch_equals_plain_decoding(self, llm):
        results = llm.generate(PROMPTS, GREEDY)
        plain = llm.plain().generate(PROMPTS, GREEDY)
        assert tokens(results) == tokens(plain)
        assert texts(results) == texts(plain)
        assert [result.prompt for result in results] == PROMPTS
        for result in results:
            assert result.completions[0].finish_reason == "length"
            assert len(result.token_ids) == result.metrics.num_tokens == 24
            figures = result.metrics
            assert 0 < figures.num_accepted < figures.num_drafted == 4 * figures.num_steps
            assert figures.acceptance_rate == figures.num_accepted / figures.num_drafted
            assert figures.mean_acceptance_length == 1 + figures.num_accepted / figures.num_steps
            assert len(figures.acceptance_rate_per_position) == 4
            assert figures.tokens_per_second == 24 / figures.seconds > 0
        assert plain[0].metrics.num_drafted == 0
        assert plain[0].metrics.num_steps == 24
        assert np.isnan(plain[0].metrics.acceptance_rate)

    @pytest.mark.slow
    def test_params_of_each_request(self, llm):
        params = [
            SamplingParams(temperature=0, max_tokens=3),
            SamplingParams(temperature=1, max_tokens=24, ignore_eos=True, seed=0),
            SamplingParams(temperature=0, max_tokens=10),
        ]
        results = llm.generate(PROMPTS, params)
        greedy = llm.generate(PROMPTS, GREEDY)
        assert [len(result.token_ids) for result in results] == [3, 24, 10]
        assert results[0].token_ids == greedy[0].token_ids[:3]
        assert results[2].token_ids == greedy[2].token_ids[:10]
        assert results[1].token_ids != greedy[1].token_ids
        steps = [result.metrics.num_steps for result in results]
        assert steps[0] < steps[2] < steps[1]

    @pytest.mark.slow
    def test_seeded_request_ignores_its_batch(self, llm):
        def seeded(seed):
            return SamplingParams(temperature=1, max_tokens=20, seed=seed)

        alone = llm.generate(PROMPTS[0], seeded(7))[0]
        first = llm.generate(PROMPTS, [seeded(7), seeded(None), seeded(3)])
        last = llm.generate(PROMPTS[::-1], [GREEDY, seeded(None), seeded(7)])
        assert alone.token_ids == first[0].token_ids == last[2].token_ids
        assert first[1].token_ids != last[1].token_ids
        assert llm.generate(PROMPTS[0], seeded(8))[0].token_ids != alone.token_ids

    def test_keys_are_those_of_the_seeds(self, llm):
        seeds = [0, 5, 2**32, 2**40 + 5]
        key_data = llm._key_data([SamplingParams(seed=seed) for seed in seeds])
        np.testing.assert_array_equal(key_data[1], jax.random.key_data(jax.random.key(5)))
        assert len({tuple(words) for words in key_data.tolist()}) == len(seeds)

    @pytest.mark.slow
    def test_token_ids_as_prompts(self, llm):
        ids = [llm.tokenizer.encode(prompt).ids for prompt in PROMPTS]
        assert ids[0][0] == 0
        assert tokens(llm.generate(ids, GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))
        assert tokens(llm.generate([np.array(row) for row in ids], GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))

    @pytest.mark.slow
    def test_proposer_as_draft(self, llm, pair):
        target, draft = pair
        other = LLM(target, proposers.draft_model(load(draft), 4), verifier=verifiers.rejection)
        assert tokens(other.generate(PROMPTS, GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))

    @pytest.mark.slow
    def test_ngram_as_draft(self, llm, pair):
        other = LLM(pair[0], "ngram", num_draft_tokens=3)
        results = other.generate(PROMPTS, GREEDY)
        assert tokens(results) == tokens(llm.generate(PROMPTS, GREEDY))
        assert sum(r.metrics.num_drafted for r in results) > 0

    @pytest.mark.slow
    @pytest.mark.usefixtures("all_programs")
    def test_nothing_is_compiled_after_the_start(self, pair):
        llm = LLM(*pair)
        params = [GREEDY, SamplingParams(temperature=1, max_tokens=9, stop_token_ids=[5, 6, 7])] * 6
        llm.generate(PROMPTS, SamplingParams(temperature=0.5, max_tokens=40))
        with Compilations() as later:
            llm.generate([PROMPTS[0] * 3, *PROMPTS * 5], SamplingParams(temperature=0.8, max_tokens=30, seed=1))
            llm.generate(PROMPTS[:2], SamplingParams(temperature=0.5, max_tokens=30, stop="no such text", top_k=7))
            llm.generate(PROMPTS * 4, params)
        assert later.number == 0

    @pytest.mark.slow
    def test_bad_words_are_text(self, chain):
        params = SamplingParams(temperature=0, max_tokens=20, bad_words="of")
        token_ids = chain.plain().generate([chain.sentence_ids[:1]], params)[0].token_ids
        end = chain.sentence_ids.index(chain.tokenizer.token_to_id("Ġof"))
        assert token_ids[: end - 1] == chain.sentence_ids[1:end]
        assert token_ids[end - 1] != chain.sentence_ids[end]

    def test_no_prompts(self, llm):
        assert llm.generate([]) == []

    @pytest.mark.slow
    def test_progress(self, chain, capsys):
        result = chain.generate([chain.sentence_ids[:1]], GREEDY, progress=True)[0]
        assert result.completions == say(chain, max_tokens=24).completions
        assert "100%" in capsys.readouterr().err


def double_first(logits, context):
    return logits.at[:20].multiply(2)


def add_one(logits, context):
    return logits + jax.numpy.arange(logits.shape[0]) / 100


class TestCompany:
    """Requests get what they get alone, whoever is decoded with them."""

    @pytest.fixture
    def narrow(self, llm):
        other = copy.copy(llm)
        other.setup = replace(llm.setup, num_slots=2)
        return other

    @pytest.mark.slow
    def test_more_samples_than_slots(self, narrow, monkeypatch):
        kinds = [  # all ask for log-probabilities, as several samples do, so that steps have one use
            replace(GREEDY, logprobs=0),
            SamplingParams(temperature=1, seed=1, max_tokens=30, logprobs=0),
            SamplingParams(temperature=0.8, seed=2, max_tokens=5, top_k=9, logprobs=0),
            SamplingParams(temperature=0.9, seed=3, max_tokens=12, n=2, best_of=3, logprobs=0),
        ]
        requests = [(prompt, params) for prompt in PROMPTS for params in kinds]
        num_live, advance = [], run.Run.advance
        monkeypatch.setattr(run.Run, "advance", lambda self: num_live.append(len(self.live)) or advance(self))
        results = narrow.generate(*map(list, zip(*requests, strict=True)))
        assert max(num_live) <= 4  # others take no memory yet
        for (prompt, params), result in zip(requests, results, strict=True):
            (alone,) = narrow.generate(prompt, params)
            assert result.prompt == prompt
            assert [each.token_ids for each in result.completions] == [each.token_ids for each in alone.completions]
            assert (result.metrics[:6], result.num_prompt_tokens) == (alone.metrics[:6], alone.num_prompt_tokens)

    @pytest.mark.slow
    def test_without_pages(self, llm, narrow):
        narrow.setup = replace(narrow.setup, model=replace(llm.model, takes_pages=False))
        # The last row is sampled, so that all steps have one use.
        params = [SamplingParams(temperature=(i + 1) % 2, seed=i, max_tokens=9 + i) for i in range(3)]
        assert tokens(narrow.generate(PROMPTS, params)) == tokens(llm.generate(PROMPTS, params))

    @pytest.mark.slow
    def test_grammars(self, narrow):
        choices = [["a cat", "a dog"], ["the mat"], ["end", "the END"]]
        sources = [guided.Choices(texts) for texts in choices]
        compiled = sources[1].compile(guided.vocabulary(narrow.tokenizer), narrow.eos_token_ids)
        grammars = [sources[0], compiled, None, sources[2], sources[0]]
        params = [SamplingParams(temperature=1, seed=i, guided_decoding=g) for i, g in enumerate(grammars)]
        results = narrow.generate(["a"] * 5, params)
        for result, texts in zip(results, [choices[0], choices[1], None, choices[2], choices[0]], strict=True):
            assert texts is None or result.text in texts
        assert narrow.stream("a", params[1]).result.text == ""
        assert "".join(piece.text for piece in narrow.stream("a", params[1])) == "the mat"

    def test_logits_processors_keep_their_order(self):
        rows = [[double_first, add_one], [add_one, double_first], [add_one], [add_one, add_one], None]
        own, known = run._placed_processors([SamplingParams(temperature=0, logits_processors=row) for row in rows])
        for row, placed in zip(rows, own, strict=True):
            assert [each.function for each in placed] == (row or [])
            assert [each for each in known if each in placed] == placed

    @pytest.mark.slow
    def test_logits_processors_in_any_order(self, narrow):
        rows = [[double_first, add_one], [add_one, double_first], [add_one, add_one], None]
        params = [SamplingParams(temperature=0, max_tokens=9, logits_processors=row) for row in rows]
        together = narrow.generate([PROMPTS[0]] * len(rows), params)
        alone = narrow.generate(PROMPTS[0], params[1])[0].token_ids
        assert tokens(together)[1] == alone
        assert len({tuple(result.token_ids) for result in together}) > 2

    @pytest.mark.parametrize(
        "platform, on_one, on_three",
        [("cpu", [8, 8, 8, 32, 32], [3, 9, 33]), ("gpu", [64, 64, 64, 64, 64], [3, 66, 66])],
    )
    def test_number_of_slots(self, platform, on_one, on_three, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        assert [run.choose_num_slots(None, n) for n in (1, 2, 63, 64, 1000)] == on_one
        assert [run.choose_num_slots(None, n, 3) for n in (1, 2, 64)] == on_three
        assert [run.choose_num_slots(5, n) for n in (1, 2, 1000)] == [5, 5, 5]

    @pytest.mark.slow
    def test_devices_that_share_the_target(self, llm, pair):
        if jax.device_count() != 4:
            pytest.skip("needs four devices, as CPUs have in these tests")
        shared = LLM(*pair, tensor_parallel=2)
        expected = tokens(llm.generate(PROMPTS, GREEDY))
        assert tokens(shared.generate(PROMPTS, GREEDY)) == expected
        mesh = jax.make_mesh((2, 2), ("batch", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        shared = LLM(*pair, mesh=mesh, num_slots=2)
        assert tokens(shared.generate(PROMPTS, GREEDY)) == expected
        assert tokens([shared.generate(PROMPTS[0], GREEDY)[0]]) == expected[:1]
        with pytest.raises(ValueError, match=r"the batch must be a multiple of the 2 devices .*, got 3 rows"):
            LLM(*pair, mesh=mesh, num_slots=3)
        with pytest.raises(ValueError, match=r"tensor_parallel must be 1 where mesh is given, got 2"):
            LLM(*pair, mesh=mesh, tensor_parallel=2)
        with pytest.raises(ValueError, match=r"tensor_parallel must be in \[1, 4\], the number of devices, got 5"):
            LLM(*pair, tensor_parallel=5)

    def test_an_error_of_the_tokenizer(self, llm, monkeypatch):
        def fail(self, tokens):
            raise UnicodeError("no such letter")

        monkeypatch.setattr(Detokenizer, "extend", fail)
        with pytest.raises(GenerationError, match=r"prompts\[0\]: no such letter, and 2 other prompts") as caught:
            llm.generate(PROMPTS, GREEDY)
        assert isinstance(caught.value.__cause__, UnicodeError) and caught.value.results == [None] * 3


class TestEnds:
    @pytest.mark.slow
    def test_end_of_sequence(self, chain):
        result = say(chain)
        completion = result.completions[0]
        assert completion == Completion(SENTENCE[1:], chain.sentence_ids[1:], None, "stop", None)
        assert result.metrics.acceptance_rate == 1

    @pytest.mark.slow
    def test_max_tokens(self, chain):
        completion = say(chain, max_tokens=5).completions[0]
        assert completion == Completion("o東\ufffd", chain.sentence_ids[1:6], None, "length", None)

    @pytest.mark.slow
    def test_max_length(self, chain):
        short = copy.copy(chain)
        short.setup = replace(chain.setup, max_length=12)
        result = say(short)
        completion = result.completions[0]
        assert (completion.token_ids, completion.finish_reason) == (chain.sentence_ids[1:12], "length")

    @pytest.mark.slow
    def test_stop_tokens_min_tokens_ignore_eos(self, chain):
        of = chain.tokenizer.token_to_id("Ġof")
        params = [
            SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[of]),
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=40, min_tokens=30),
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[1]),
        ]
        completions = [r.completions[0] for r in chain.plain().generate([chain.sentence_ids[:1]] * 4, params)]
        end = chain.sentence_ids.index(of)
        text = SENTENCE[1 : SENTENCE.index(" of") + 3]
        assert completions[0] == Completion(text, chain.sentence_ids[1 : end + 1], None, "stop", of)
        assert completions[1].finish_reason == "length"
        assert completions[1].token_ids[: len(chain.sentence_ids)][-2] == 1
        assert len(completions[1].token_ids) == 40
        assert len(completions[2].token_ids) >= 30
        assert 1 not in completions[2].token_ids[:30]
        assert completions[3] == Completion(SENTENCE[1:], chain.sentence_ids[1:], None, "stop", 1)

    @pytest.mark.parametrize("stop", ["o", " END", "京é", "é🚀,", "ND o", ", END of i", "t", "🚀"])
    def test_stop_string(self, chain, stop):
        params = SamplingParams(temperature=0, max_tokens=40, stop=stop)
        result = say(chain, stop=stop)
        completion = result.completions[0]
        kept = SENTENCE[1 : SENTENCE.index(stop, 1)]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (kept, "stop", stop)
        assert completion.token_ids == chain.sentence_ids[1 : 1 + len(completion.token_ids)]
        assert chain.tokenizer.decode(completion.token_ids).startswith(kept)
        assert not chain.tokenizer.decode(completion.token_ids[:-1]).startswith(kept or "nothing")

        stream = chain.stream(chain.sentence_ids[:1], params)
        assert "".join(piece.text for piece in stream) == kept
        assert stream.result.completions == result.completions

    def test_stop_string_in_the_output(self, chain):
        params = SamplingParams(temperature=0, max_tokens=40, stop="é🚀,", include_stop_str_in_output=True)
        result = chain.generate([chain.sentence_ids[:1]], params)[0]
        assert (result.text, result.completions[0].stop_reason) == ("o東京é🚀,", "é🚀,")
        stream = chain.stream(chain.sentence_ids[:1], params)
        assert "".join(piece.text for piece in stream) == result.text
        assert stream.result.completions == result.completions

    def test_without_text(self, chain):
        assert say(chain, detokenize=False).completions == [Completion("", chain.sentence_ids[1:], None, "stop", None)]

    def test_special_tokens_in_the_text(self, chain):
        assert say(chain, skip_special_tokens=False).text == f"{SENTENCE[1:]} {EOS}"
        shown = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        assert say(chain, **shown).text == f"{SENTENCE[1:]}{EOS}"

    def test_first_of_several_stop_strings(self, chain):
        completion = say(chain, stop=["it", "END", "🚀, E", "go"]).completions[0]
        assert (completion.text, completion.stop_reason) == ("o東京é", "🚀, E")

    def test_stop_string_that_does_not_come(self, chain):
        assert say(chain, stop=["END on", "its", "🚀 "]).completions == say(chain).completions

    @pytest.mark.slow
    def test_stop_string_of_one_row(self, chain):
        params = [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in ("東", None, ", ", "t")]
        results = chain.plain().generate([chain.sentence_ids[:1]] * 4, params)
        assert texts(results) == ["o", SENTENCE[1:], "o東京é🚀", SENTENCE[1:-1]]
        assert [result.metrics.num_steps for result in results] == [4, 20, 15, 19]  # up to its stop string


class TestStream:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [1, 2])
    def test_equals_generate(self, llm, seed):
        params = SamplingParams(temperature=1, max_tokens=30, seed=seed)
        result = llm.generate(PROMPTS[0], params)[0]
        stream = llm.stream(PROMPTS[0], params)
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == result.text
        assert [piece.token_id for piece in pieces] == result.token_ids
        assert stream.result.completions == result.completions
        assert stream.result.metrics[:4] == result.metrics[:4]

    @pytest.mark.slow
    def test_kinds(self, llm, chain):
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=1, max_tokens=30, seed=1))
        kinds = [piece.kind for piece in stream]
        figures = stream.result.metrics
        assert set(kinds) <= {"accepted", "recovered", "bonus"}
        assert kinds.count("recovered") + kinds.count("bonus") in (figures.num_steps, figures.num_steps - 1)
        assert 0 < kinds.count("accepted") <= figures.num_accepted

        ids = chain.sentence_ids
        kinds = [piece.kind for piece in chain.stream(ids[:1], SamplingParams(temperature=0, max_tokens=40))]
        assert kinds == (["accepted"] * 3 + ["bonus"]) * (len(kinds) // 4)
        plain = chain.plain().stream(ids[:1], SamplingParams(temperature=0, max_tokens=40))
        assert {piece.kind for piece in plain} == {"target"}

    def test_whole_characters(self, chain):
        pieces = list(chain.stream(chain.sentence_ids[:1], SamplingParams(temperature=0, max_tokens=40)))
        assert [piece.text for piece in pieces if piece.text] == [*"o東京é🚀,", " END", " of", " ", "i", "t"]
        assert pieces[:4] == [
            Piece("o", 80, "accepted"),
            Piece("", 164, "accepted"),
            Piece("", 253, "accepted"),
            Piece("東", 111, "bonus"),
        ]

    def test_left_early(self, chain):
        stream = chain.stream(chain.sentence_ids[:1], SamplingParams(temperature=0, max_tokens=40))
        assert stream.result.completions[0] == Completion("", [], None, None, None)
        pieces = [next(stream) for _ in range(6)]
        completion = stream.result.completions[0]
        assert completion == Completion("o東", [piece.token_id for piece in pieces], None, None, None)
        assert stream.result.metrics.num_tokens == 6

        stream = chain.stream(chain.sentence_ids[:1], SamplingParams(temperature=0, max_tokens=4))
        reasons = [stream.result.completions[0].finish_reason for _ in stream]
        assert reasons == [None, None, None, "length"]

    def test_interrupted(self, chain, monkeypatch):
        stream = chain.stream(chain.sentence_ids[:1], SamplingParams(temperature=0, max_tokens=40))
        next(stream)

        def interrupt(*args, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(slots.Slots, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert stream.result.text == "o東"
        assert stream.result.completions[0].finish_reason is None
        assert stream.result.metrics.num_steps == 1


class TestCheckpoints:
    def test_own_model_without_draft_is_plain(self, pair):
        assert LLM(pair[0]).proposer.num_draft_tokens == 0
        assert LLM(*pair, num_draft_tokens=0).proposer.num_draft_tokens == 0
        assert LLM(*pair).proposer.num_draft_tokens == 4

    @pytest.mark.parametrize(("value", "expected"), [(1, (1,)), ([1, 5], (1, 5)), (None, ())])
    def test_end_of_sequence_ids(self, tmp_path, value, expected):
        directory = write_checkpoint(tmp_path / "model", random_tensors(0), eos_token_id=value)
        assert LLM(directory).eos_token_ids == expected

    def test_tokenizer_beside_the_checkpoint(self, tmp_path):
        directory = write_checkpoint(tmp_path / "model", random_tensors(0))
        (directory / "tokenizer.json").rename(tmp_path / "tokenizer.json")
        assert LLM(directory).tokenizer.get_vocab_size() == make_tokenizer().get_vocab_size()

    def test_tokenizer_does_not_truncate(self, tmp_path):
        directory = write_checkpoint(tmp_path / "model", random_tensors(0))
        tokenizer = make_tokenizer()
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        tokenizer.save(str(directory / "tokenizer.json"))
        ids = make_tokenizer().encode(PROMPTS[2]).ids
        assert LLM(directory).tokenizer.encode(PROMPTS[2]).ids == ids

    def test_dtype(self, pair):
        llm = LLM(*pair, dtype="bfloat16")
        assert {str(x.dtype) for x in jax.tree.leaves((llm.model, llm.proposer))} == {"bfloat16"}

    def test_dtype_of_the_checkpoint(self, tmp_path, monkeypatch):
        directory = write_checkpoint(tmp_path / "model", random_tensors(0))
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))

        def dtype(model):
            return LLM(model).model.params["embedding"].dtype

        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        assert dtype(directory) == "float32"
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert dtype(directory) == "bfloat16"
        assert dtype(None) == "float32"
        (directory / "config.json").write_text(json.dumps(config | {"dtype": "float8"}))
        with pytest.raises(ValueError, match=r"dtype in .*config.json must be 'float32' or"):
            LLM(directory)


def test_an_engine_of_an_llm(llm, monkeypatch):
    """It has the models, limits and verifier of the LLM; options replace them."""

    class Given(Engine):
        def __init__(self, *models, **options):
            self.models, self.options = models, options

    limits = {"tokenizer": llm.tokenizer, "eos_token_ids": llm.eos_token_ids, "max_length": llm.max_length}
    other = copy.copy(llm)
    other.setup = replace(llm.setup, num_slots=2, verifier=verifiers.match)
    engine = Given.of(other, max_waiting=3)
    assert engine.models == (llm.model, llm.proposer)
    assert engine.options == limits | {"num_slots": 2, "verifier": verifiers.match, "max_waiting": 3}
    engine = Given.of(other, num_slots=5, max_length=24, verifier=verifiers.block)
    assert engine.options == limits | {"num_slots": 5, "verifier": verifiers.block, "max_length": 24}
    for platform, number in (("cpu", 8), ("gpu", 16)):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert Given.of(llm).options["num_slots"] == number


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            ([""], {}, r"prompts\[0\] must have at least one token, got ''"),
            ([[]], {}, r"prompts\[0\] must have at least one token, got \[\]"),
            (["a", []], {}, r"prompts\[1\] must have at least one token"),
            ([[1, 300]], {}, r"prompts\[0\] must have token ids in \[0, 300\), got 300"),
            ([[-1, 3]], {}, r"prompts\[0\] must have token ids in \[0, 300\), got -1"),
            ([[1.5]], {}, r"prompts\[0\] must be a string or a list of token ids, got \[1.5\]"),
            ([1, 2], {}, r"prompts\[0\] must be a string or a list of token ids, got 1"),
            ([[5] * MAX_LENGTH], {}, r"prompts\[0\] must leave room for one token in max_length = 192, got 192 tokens"),
            (["a"], {"params": [GREEDY, GREEDY]}, "params must be one for all or one for each of 1 prompts, got 2"),
            (["a"], {"params": SamplingParams(stop_token_ids=[300])}, "stop_token_ids must be in .*300"),
        ],
    )
    def test_request(self, llm, prompts, options, message):
        if message is None:  # a tokenizer that begins every text with a token makes a prompt of no text
            assert len(llm.generate(prompts, GREEDY)[0].token_ids) == 24
            return
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, **options)

    def test_stream(self, llm):
        with pytest.raises(ValueError, match="must have at least one token"):
            llm.stream([])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_draft_tokens": -1}, "num_draft_tokens must be an integer >= 0 or 'auto', got -1"),
            ({"num_draft_tokens": MAX_LENGTH}, "num_draft_tokens must be less than 192, the model's limit, got 192"),
            ({"max_length": MAX_LENGTH + 1}, r"max_length must be in \[2, 192\], the model's limit, got 193"),
            ({"num_slots": 0}, "num_slots must be None or an integer >= 1, got 0"),
            ({"num_draft_tokens": True}, "num_draft_tokens must be an integer >= 0 or 'auto', got True"),
            ({"max_length": 100.5}, r"max_length must be in \[2, 192\], the model's limit, got 100.5"),
            ({"max_length": 1}, r"max_length must be in \[2, 192\], the model's limit, got 1"),
            (
                {"model": "./no/such"},
                "model must be a directory with a Hugging Face checkpoint, or the name of one .*, got './no/such'",
            ),
            (
                {"draft": "./no/such"},
                "draft must be a directory with a Hugging Face checkpoint, or the name of one .*, got './no/such'",
            ),
            ({"model": ""}, "model must be a directory with a Hugging Face checkpoint, .*, got ''"),
            ({"draft": ""}, "draft must be a directory with a Hugging Face checkpoint, .*, got ''"),
            ({"draft": 3}, "draft must be a directory, 'ngram', 'self', 'mtp' or a proposer, got int"),
            ({"draft": np.zeros(2)}, "draft must be a directory, 'ngram', 'self', 'mtp' or a proposer, got ndarray"),
            ({"num_draft_tokens": np.zeros(2)}, "num_draft_tokens must be an integer >= 0 or 'auto', got array"),
            ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16, got int8"),
        ],
    )
    def test_arguments(self, pair, options, message):
        with pytest.raises(ValueError, match=message):
            LLM(**{"model": pair[0], "draft": pair[1]} | options)

    def test_vocabularies_differ(self, pair, tmp_path):
        other = write_checkpoint(tmp_path / "other", random_tensors(0, vocab_size=310), vocab_size=310)
        with pytest.raises(ValueError, match="300 tokens, got 310"):
            LLM(pair[0], proposers.draft_model(load(other), 2))

    def test_no_tokenizer(self, tmp_path):
        directory = write_checkpoint(tmp_path / "model", random_tensors(0))
        (directory / "tokenizer.json").unlink()
        with pytest.raises(
            ValueError, match=r"model must have a tokenizer.json in its directory or beside it, got '.*model'"
        ):
            LLM(directory)
