"""Train the embedded pair on the Python standard library: a tokenizer, a target, and a draft distilled from the target.

    python scripts/train_embedded.py

The script writes `tokenizer.json` and the Hugging Face checkpoints `target/` and `draft/`, and prints losses and
acceptance on held-out text. It is meant for one GPU.

The draft first learns the target's distribution on the text of the library, and then also on the target's own
continuations, because in decoding it has to predict those.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specjax.models import EMBEDDED
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.types import Array, Model, ModelInput, PyTree

# The tokenizer and the models never see these modules and their tests.
HELD_OUT = (
    "bisect",
    "calendar",
    "colorsys",
    "csv",
    "fnmatch",
    "graphlib",
    "heapq",
    "queue",
    "shelve",
    "statistics",
    "textwrap",
    "wave",
)
SEPARATOR = "<|endoftext|>"  # token 0, which precedes every document

TARGET = DecoderConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    mlp_size=704,
    max_length=2048,
)
DRAFT = DecoderConfig(
    vocab_size=4096,
    hidden_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=40,
    mlp_size=432,
    max_length=2048,
)
TARGET_RATE, DRAFT_RATE = 1.5e-3, 3e-3  # peak learning rates
TEXT_WEIGHT = 0.1  # weight of the text's cross entropy in the draft's loss; the divergence from the target has the rest
CROP, SAMPLE = 512, 256  # tokens per row in most training batches, and tokens per continuation of the target
ROWS_PER_CALL = 2048  # continuations sampled in one call, limited by the memory of their cache
MAX_SHARD_BYTES = 14_000_000  # maximum size of a safetensors file


def read_documents(stdlib: Path) -> tuple[list[str], list[str]]:
    """Return the texts of the UTF-8 Python files below a directory: those to train on, and those held out.

    Raises:
        ValueError: the directory has no files to train on, or none that are held out.
    """
    training, held_out = [], []
    for path in sorted(stdlib.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # the library has such files to test its decoders
            continue
        (held_out if path.stem.removeprefix("test_") in HELD_OUT else training).append(text)
    if not training or not held_out:
        raise ValueError(f"stdlib must hold Python modules, some of them held out, got {stdlib}")
    return training, held_out


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which decodes every text exactly and puts the separator before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=TARGET.vocab_size,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, tokenizer.token_to_id(SEPARATOR))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> Array:
    """Return all documents as one stream of tokens [N] int32, with a separator before each."""
    return jnp.asarray(np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(documents)]), jnp.int32)


def bfloat16(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def logits_of(model: Model, tokens: Array) -> Array:
    """Return the logits [B, T, V] float32 of sequences of tokens [B, T] from position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.apply(model.params, ModelInput(tokens, positions), None)[0].logits


def crops(key: Array, stream: Array, num_rows: int, length: int) -> Array:
    """Return random pieces [num_rows, length] of a stream [N]."""
    start = jax.random.randint(key, (num_rows, 1), 0, len(stream) - length + 1)
    return stream[start + jnp.arange(length)]


def target_loss(params: PyTree, key: Array, corpus: Array, *, num_tokens: int, length: int) -> Array:
    """Return the cross entropy of the target on random crops of the corpus."""
    rows = crops(key, corpus, num_tokens // length, length + 1)
    logits = logits_of(decoder_model(TARGET, bfloat16(params)), rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def distillation_loss(params: PyTree, target: Model, rows: Array) -> Array:
    """Return the draft's loss on rows of tokens [B, T+1].

    It is KL(target || draft) plus their total variation, which is the rejection rate, with a small share of cross
    entropy on the tokens themselves.
    """
    log_draft = jax.nn.log_softmax(logits_of(decoder_model(DRAFT, bfloat16(params)), rows[:, :-1]))
    log_target = jax.lax.stop_gradient(jax.nn.log_softmax(logits_of(target, rows[:, :-1])))
    divergence = jnp.sum(jnp.exp(log_target) * (log_target - log_draft), axis=-1).mean()
    divergence += 0.5 * jnp.sum(jnp.abs(jnp.exp(log_target) - jnp.exp(log_draft)), axis=-1).mean()
    cross_entropy = -jnp.take_along_axis(log_draft, rows[:, 1:, None], axis=-1).mean()
    return (1 - TEXT_WEIGHT) * divergence + TEXT_WEIGHT * cross_entropy


def text_loss(params: PyTree, key: Array, target: Model, corpus: Array, *, num_tokens: int, length: int) -> Array:
    """Return the draft's loss on random crops of the corpus."""
    return distillation_loss(params, target, crops(key, corpus, num_tokens // length, length + 1))


def mixed_loss(
    params: PyTree, key: Array, target: Model, corpus: Array, samples: Array, *, num_tokens: int, length: int
) -> Array:
    """Return the draft's loss, half on crops of the corpus and half on continuations [N, SAMPLE+1] by the target."""
    text_key, sample_key = jax.random.split(key)
    on_text = text_loss(params, text_key, target, corpus, num_tokens=num_tokens // 2, length=length)
    row = jax.random.randint(sample_key, (num_tokens // 2 // SAMPLE,), 0, len(samples))
    return (on_text + distillation_loss(params, target, samples[row])) / 2


def fit(name: str, params: PyTree, peak_rate: float, stages: list[tuple[int, Callable, tuple]]) -> PyTree:
    """Train with AdamW and return the parameters.

    Args:
        name: name of the model, for the log.
        params: initial parameters, float32.
        peak_rate: largest learning rate of the schedule.
        stages: (steps, loss, data) for each stage; loss(params, key, *data) draws its own batch from the data.
    """
    total = sum(steps for steps, _, _ in stages)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak_rate, total // 20, total, peak_rate / 20)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=partial(jax.tree.map, lambda x: x.ndim > 1)),
    )
    state = optimizer.init(params)
    key = jax.random.key(1)

    @partial(jax.jit, static_argnames="loss", donate_argnames=("params", "state"))
    def run(params, state, first, last, loss, data):
        def step(i, carry):
            params, state, sum_loss = carry
            value, gradient = jax.value_and_grad(loss)(params, jax.random.fold_in(key, i), *data)
            update, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, update), state, sum_loss + value

        return jax.lax.fori_loop(first, last, step, (params, state, jnp.float32(0)))

    done = 0
    for steps, loss, data in stages:
        end = done + steps
        while done < end:
            last = min(done + 100, end)
            start = time.perf_counter()
            params, state, sum_loss = run(params, state, done, last, loss, data)
            mean_loss = float(sum_loss) / (last - done)
            speed = (last - done) * loss.keywords["num_tokens"] / (time.perf_counter() - start)
            print(f"{name} step {last}/{total}: loss {mean_loss:.3f}, {speed:,.0f} tokens/s", flush=True)
            done = last
    return params


def train_target(params: PyTree, corpus: Array, num_steps: int, num_tokens: int) -> Model:
    """Train the target: most steps on short rows, and the last ones on rows of the full length for far positions."""
    num_full = num_steps // 6
    stages = [
        (num_steps - num_full, partial(target_loss, num_tokens=num_tokens, length=CROP), (corpus,)),
        (num_full, partial(target_loss, num_tokens=num_tokens, length=TARGET.max_length), (corpus,)),
    ]
    return decoder_model(TARGET, bfloat16(fit("target", params, TARGET_RATE, stages)))


def train_draft(params: PyTree, target: Model, corpus: Array, samples: Array, num_steps: int, num_tokens: int) -> Model:
    """Train the draft: first on short rows of text, then on rows of the full length and the target's continuations."""
    num_mixed = num_steps * 3 // 4
    mixed = partial(mixed_loss, num_tokens=num_tokens, length=TARGET.max_length)
    stages = [
        (num_steps - num_mixed, partial(text_loss, num_tokens=num_tokens, length=CROP), (target, corpus)),
        (num_mixed, mixed, (target, corpus, samples)),
    ]
    return decoder_model(DRAFT, bfloat16(fit("draft", params, DRAFT_RATE, stages)))


@jax.jit
def continue_rows(target: Model, key: Array, rows: Array, prompt_lengths: Array, temperature: Array) -> Array:
    """Keep the prompts of rows [N, T+1] and let the target generate the rest of each row at its temperature [N]."""

    def step(carry, i):
        token, cache = carry
        inputs = ModelInput(token[:, None], jnp.full((len(rows), 1), i))
        output, cache = target.apply(target.params, inputs, cache)
        noise = jax.random.gumbel(jax.random.fold_in(key, i), (len(rows), target.vocab_size))
        sampled = jnp.argmax(output.logits[:, 0] + temperature[:, None] * noise, axis=-1)
        token = jnp.where(i + 1 < prompt_lengths, rows[:, i + 1], sampled)
        return (token, cache), token

    length = rows.shape[1] - 1
    _, tokens = jax.lax.scan(step, (rows[:, 0], target.init_cache(len(rows), length)), jnp.arange(length))
    return jnp.concatenate([rows[:, :1], tokens.T], axis=1)


def sample_continuations(target: Model, corpus: Array, num_samples: int) -> Array:
    """Sample continuations [num_samples, SAMPLE+1] of prompts of 32 to 64 tokens.

    Half of them are greedy, and half are sampled at temperature 0.8.
    """
    num_rows = min(num_samples, ROWS_PER_CALL)
    temperature = jnp.where(jnp.arange(num_rows) % 2 == 0, 0.0, 0.8)
    samples = []
    for key in jax.random.split(jax.random.key(2), num_samples // num_rows):
        crop_key, length_key, sample_key = jax.random.split(key, 3)
        rows = crops(crop_key, corpus, num_rows, SAMPLE + 1)
        prompt_lengths = jax.random.randint(length_key, (num_rows,), 32, 65)
        samples.append(continue_rows(target, sample_key, rows, prompt_lengths, temperature))
    return jnp.concatenate(samples)


@jax.jit
def compare(target: Model, draft: Model, rows: Array) -> Array:
    """Return target loss, draft loss, greedy agreement and mean sum of min(target, draft), over rows [N, T+1]."""

    def one(row):
        target_logits, draft_logits = logits_of(target, row[None, :-1])[0], logits_of(draft, row[None, :-1])[0]
        losses = [
            optax.softmax_cross_entropy_with_integer_labels(logits, row[1:]).mean()
            for logits in (target_logits, draft_logits)
        ]
        agreement = jnp.mean(target_logits.argmax(-1) == draft_logits.argmax(-1))
        overlap = jnp.minimum(jax.nn.softmax(target_logits), jax.nn.softmax(draft_logits)).sum(-1).mean()
        return jnp.stack([*losses, agreement, overlap])

    return jax.lax.map(one, rows).mean(0)


def report(name: str, target: Model, draft: Model, held_out: Array) -> None:
    """Print the losses of both models on held-out text, and how well the draft predicts the target."""
    rows = held_out[: len(held_out) // (CROP + 1) * (CROP + 1)].reshape(-1, CROP + 1)
    target_loss, draft_loss, agreement, overlap = compare(target, draft, rows).tolist()
    print(
        f"held-out text {name}: target {target_loss:.3f} nats/token, draft {draft_loss:.3f} nats/token, "
        f"greedy agreement {agreement:.3f}, sum min(target, draft) {overlap:.3f}",
        flush=True,
    )


def hugging_face_tensors(config: DecoderConfig, params: PyTree) -> dict[str, np.ndarray]:
    """Return the parameters of a tied decoder with the names and the orientation of a Llama checkpoint."""
    heads, kv_heads = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    tensors = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]}
    for i, layer in params["layers"].items():
        query, key, value = jnp.split(layer["qkv"], (heads, heads + kv_heads), axis=1)
        gate, up = jnp.split(layer["gate_up"], 2, axis=1)
        tensors |= {
            f"model.layers.{i}.input_layernorm.weight": layer["attention_norm"],
            f"model.layers.{i}.self_attn.q_proj.weight": query.T,
            f"model.layers.{i}.self_attn.k_proj.weight": key.T,
            f"model.layers.{i}.self_attn.v_proj.weight": value.T,
            f"model.layers.{i}.self_attn.o_proj.weight": layer["attention_out"].T,
            f"model.layers.{i}.post_attention_layernorm.weight": layer["mlp_norm"],
            f"model.layers.{i}.mlp.gate_proj.weight": gate.T,
            f"model.layers.{i}.mlp.up_proj.weight": up.T,
            f"model.layers.{i}.mlp.down_proj.weight": layer["mlp_out"].T,
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def hugging_face_config(config: DecoderConfig) -> dict:
    """Return the config.json of a decoder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def save(directory: Path, config: DecoderConfig, params: PyTree) -> None:
    """Write a Hugging Face checkpoint, with safetensors files of at most MAX_SHARD_BYTES."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    (directory / "config.json").write_text(json.dumps(hugging_face_config(config), indent=2) + "\n")

    shards = [{}]
    for name, tensor in hugging_face_tensors(config, params).items():
        if sum(x.nbytes for x in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total_size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=sysconfig.get_paths()["stdlib"], help="Python files to train on")
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="directory for tokenizer.json, target/ and draft/")
    parser.add_argument("--steps", type=int, default=1200, help="training steps of the target; more steps overfit")
    parser.add_argument("--draft-steps", type=int, default=6000, help="training steps of the draft")
    parser.add_argument("--num-tokens", type=int, default=32768, help="tokens per step, at least 4096")
    parser.add_argument("--num-samples", type=int, default=32 * ROWS_PER_CALL, help="continuations that the draft sees")
    args = parser.parse_args()
    begin = time.perf_counter()

    def log(message: str) -> None:
        print(f"[{time.perf_counter() - begin:.0f} s] {message}", flush=True)

    training, held_out = read_documents(Path(args.stdlib))
    log(f"{len(training)} training and {len(held_out)} held-out files on {jax.devices()[0].device_kind}")
    tokenizer = train_tokenizer(training)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    corpus, held_out = encode(tokenizer, training), encode(tokenizer, held_out)
    log(f"{len(corpus):,} training and {len(held_out):,} held-out tokens")

    target_params, draft_params = init_params(TARGET, seed=0), init_params(DRAFT, seed=1)
    target, draft = decoder_model(TARGET, bfloat16(target_params)), decoder_model(DRAFT, bfloat16(draft_params))
    report("before", target, draft, held_out)

    target = train_target(target_params, corpus, args.steps, args.num_tokens)
    save(args.out / "target", TARGET, target.params)
    log("target trained")
    report("with a trained target", target, draft, held_out)

    samples = sample_continuations(target, corpus, args.num_samples).block_until_ready()
    log(f"{len(samples)} continuations sampled; one: {tokenizer.decode(samples[0].tolist())!r}")

    draft = train_draft(draft_params, target, corpus, samples, args.draft_steps, args.num_tokens)
    save(args.out / "draft", DRAFT, draft.params)
    report("after", target, draft, held_out)
    log("done")


if __name__ == "__main__":
    main()
