"""Write a checkpoint of random bfloat16 weights, to measure a server with a model of real size.

    python scripts/random_checkpoint.py build/8b --shape 8b
    specjax serve --model build/8b --num-slots 64 --max-length 2048 --name 8b &
    specjax bench --url http://127.0.0.1:8000 --vocab-size 128000 --concurrency 64

Its tokens are the words "0", "1" and so on, so that every one has text. It writes the files of a Llama checkpoint.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from bench_decode import SHAPES, random_model
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specjax.training.export import layer_config, layer_tensors


def write(directory: Path, shape: str) -> None:
    """Write the configuration, a tokenizer, and a file of weights a layer, with an index."""
    config = SHAPES[shape]
    directory.mkdir(parents=True)
    fields = layer_config(config, config.vocab_size) | {"tie_word_embeddings": config.tie_embeddings}
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | fields, indent=2))
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(config.vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))

    params = random_model(config).params
    names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    rest = {names[name]: np.asarray(value) for name, value in params.items() if name in names}
    places = _save(directory, "model-rest.safetensors", rest)
    for i, layer in params["layers"].items():
        places |= _save(directory, f"model-{i}.safetensors", layer_tensors(config, layer, f"model.layers.{i}"))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _save(directory: Path, file: str, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Write tensors, and return the file of each."""
    save_file(tensors, directory / file, metadata={"format": "pt"})
    return dict.fromkeys(tensors, file)


def main() -> None:
    """Read the arguments and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a directory that does not exist")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    args = parser.parse_args()
    write(args.directory, args.shape)


if __name__ == "__main__":
    main()
