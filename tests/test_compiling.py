"""Programs of many rows are compiled with whole sums, where XLA knows that option, and give the same tokens."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from specjax import SamplingParams, decode, sampling
from specjax.decoding import compiling
from specjax.decoding.compiling import MANY_ROWS, MANY_SLOTS, compiled, gains_from_whole_sums
from specjax.engine import slots
from specjax.engine.slot_rows import request
from specjax.engine.slots import Slots, chunk_at
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.quantized import quantize
from specjax.models.sharding import tensor_parallel
from specjax.sampling.capacities import Needs, neutral

CHUNK = 64
CONFIG = DecoderConfig(31, 16, 1, 2, 1, 8, 16, 128)


def floats(dtype="float32"):
    return decoder_model(CONFIG, jax.tree.map(lambda x: x.astype(dtype), init_params(CONFIG, 0)))


def codes():
    model = floats("bfloat16")
    layer = model.params["layers"][0]
    layer = layer | {"mlp_out": quantize(layer["mlp_out"].T, "int8")}
    return decoder_model(CONFIG, model.params | {"layers": {0: layer}})


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize(
    "num_slots,num_rows,is_whole",
    [
        (MANY_SLOTS, MANY_ROWS, True),
        (MANY_SLOTS, MANY_ROWS - 1, False),
        (MANY_SLOTS - 1, 4 * MANY_ROWS, False),
        (256, 256, True),
    ],
)
def test_many_rows_have_whole_sums(num_slots, num_rows, is_whole):
    function = compiled(lambda x: x + 1)
    chosen = function.for_rows(num_slots, num_rows)
    assert chosen is (function.whole_sums if is_whole else function.usual)
    assert chosen(2) == 3


def test_this_version_of_xla_knows_the_option():
    assert compiling.is_known()


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch, on_gpu):
    monkeypatch.setattr(compiling, "WHOLE_SUMS", {"xla_gpu_no_such_option": 1})
    compiling.is_known.cache_clear()
    try:
        assert not gains_from_whole_sums(floats("bfloat16"))
    finally:
        compiling.is_known.cache_clear()


def test_models_of_16_bits_gain_on_one_gpu(on_gpu):
    model = floats("bfloat16")
    assert gains_from_whole_sums(model)
    assert not gains_from_whole_sums(tensor_parallel(model, Mesh(np.array(jax.devices("cpu")[:1]), ("tensor",))))
    assert not gains_from_whole_sums(codes())
    assert not gains_from_whole_sums(floats())


def test_cpus_compile_as_usual():
    assert jax.default_backend() == "cpu"
    assert not gains_from_whole_sums(floats("bfloat16"))


def test_slots_of_many_rows_take_them_and_give_the_same_tokens(monkeypatch):
    calls, step = [], slots._step

    def counted(model, proposer, state, rows, **options):
        calls.append(rows)
        return step.whole_sums(model, proposer, state, rows, **options)

    monkeypatch.setattr(slots, "_step", replace(step, whole_sums=counted))

    def tokens(has_gain):
        monkeypatch.setattr(slots, "gains_from_whole_sums", lambda model: has_gain)
        batch = Slots(floats(), num_slots=MANY_ROWS, max_length=2 * CHUNK, step_sizes=(2,))
        params = neutral(batch.capacities)._replace(max_tokens=np.int32(8))
        for slot in (1, 3):
            prompt = np.arange(3, 7, dtype=np.int32) + slot
            batch.prefill([slot], [chunk_at(prompt, 0, CHUNK, batch.no_features)])
            batch.insert(slot, request(batch.state, prompt, np.array([0, slot], np.uint32), params))
        steps = [batch.step(Needs.EVERYTHING), batch.step(Needs.EVERYTHING, rows=np.array([1, 3], np.int32))]
        return [np.asarray(steps[0].tokens)[[1, 3]], np.asarray(steps[1].tokens)]

    usual = tokens(has_gain=False)
    assert not calls
    np.testing.assert_array_equal(tokens(has_gain=True), usual)
    assert calls == [None]  # a step of two slots has few rows
    assert (np.asarray(usual) >= 0).all()


def test_generate_takes_them_outside_jit(monkeypatch):
    """Under `jax.jit` the caller's options hold."""
    calls = []

    def counted(*args):
        calls.append(len(args[3].temperature))
        return decode._generate.usual(*args)

    monkeypatch.setattr(decode, "_generate", replace(decode._generate, whole_sums=counted))
    monkeypatch.setattr(decode, "gains_from_whole_sums", lambda model: True)

    def generate(model, batch_size):
        prompts, params = np.full((batch_size, 2), 3, np.int32), [SamplingParams(temperature=0, max_tokens=3)]
        given = prompts, np.full(batch_size, 2), sampling.batch(params * batch_size), jax.random.key(0)
        state = decode.prefill(model, None, *given, max_length=5)
        return decode.generate(model, None, state).context.tokens

    model = floats()
    whole, usual = generate(model, MANY_ROWS), generate(model, 2)
    assert calls == [MANY_ROWS]
    np.testing.assert_array_equal(whole[:2], usual)
    np.testing.assert_array_equal(jax.jit(lambda: generate(model, MANY_ROWS))(), whole)
    assert calls == [MANY_ROWS]
