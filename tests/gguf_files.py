"""GGUF files: a writer, matrices of random blocks, and a small model with a tokenizer."""

import struct

import numpy as np
from quantized_files import E2M1, E4M3

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
KINDS |= {"BF16": 30, "Q2_K": 10, "Q3_K": 11, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20}
KINDS |= {"IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "NVFP4": 40}
BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}
BLOCKS |= {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
BLOCKS |= {"Q2_K": (256, 84), "Q3_K": (256, 110), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98)}
BLOCKS |= {"IQ1_S": (256, 50), "IQ4_NL": (32, 18), "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136)}
BLOCKS |= {"IQ1_M": (256, 56), "NVFP4": (64, 36)}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "IQ1_M": ()}  # places of float16; IQ1_M has the bits of one apart
IQ4_NL = np.float32([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(value):
    """Return the type and the bytes of a field."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind, form = (8, None) if isinstance(value[0], str) else (6, "<f") if isinstance(value[0], float) else (5, "<i")
    items = b"".join(text(x) if form is None else struct.pack(form, x) for x in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def write(path, fields, tensors, version=3):
    """Write a file; tensors are (kind, shape, bytes) by name."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    header += b"".join(text(name) + field(value) for name, value in fields.items())
    position, content = 0, b""
    for name, (kind, shape, data) in tensors.items():
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", KINDS[kind], position)
        content += data + bytes(-len(data) % 32)
        position = len(content)
    path.write_bytes(header + bytes(-len(header) % 32) + content)
    return path


def floats(array, kind="F32"):
    return kind, array.shape, array.astype({"F32": np.float32, "F16": np.float16}[kind]).tobytes()


def random_blocks(rng, kind, n, k):
    """Return the bytes [N, B] of random codes with scales that are small numbers; one block has a scale of 0."""
    size, num_bytes = BLOCKS[kind]
    blocks = rng.integers(0, 256, (n, k // size, num_bytes)).astype(np.uint8)
    if kind == "NVFP4":
        blocks[..., :4] = rng.uniform(0.01, 0.5, (*blocks.shape[:2], 4)).astype(E4M3).view(np.uint8)
        blocks[0, 0, 0] = 0
        return blocks.reshape(n, -1)
    for place in HALVES.get(kind, (0,)):
        numbers = rng.uniform(0.0005, 0.005, (n, k // size)).astype(np.float16)
        numbers[0, 0] = 0 if place == 0 else numbers[0, 0]
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def value_of(rows, kind):
    """Return the numbers of Q4_0, Q4_1, Q8_0, Q4_K, IQ4_NL and NVFP4, block by block and code by code."""
    num_bytes, out = BLOCKS[kind][1], []
    for row in rows:
        for block in row.reshape(-1, num_bytes):
            if kind == "NVFP4":
                for i, scale in enumerate(block[:4].view(E4M3).astype(np.float32)):
                    eight = block[4 + 8 * i : 12 + 8 * i]
                    out += [E2M1[q] * scale for q in (*(eight & 15), *(eight >> 4))]
                continue
            d = block[:2].view(np.float16).astype(np.float32)[0]
            second = block[2:4].view(np.float16).astype(np.float32)[0]
            if kind == "Q8_0":
                out += [d * np.float32(q) for q in block[2:].view(np.int8)]
            elif kind == "Q4_K":
                out += of_superblock(block, d, second)
            elif kind == "IQ4_NL":
                out += [d * IQ4_NL[q] for q in (*(block[2:] & 15), *(block[2:] >> 4))]
            else:
                codes = block[2 if kind == "Q4_0" else 4 :]
                for q in [*(codes & 15), *(codes >> 4)]:
                    out.append(d * np.float32(int(q) - 8) if kind == "Q4_0" else d * np.float32(q) + second)
    return np.array(out, np.float32).reshape(len(rows), -1)


def of_superblock(block, d, dmin):
    packed, codes, out = block[4:16], block[16:].reshape(4, 32), []
    for i in range(8):
        if i < 4:
            scale, minimum = packed[i] & 63, packed[i + 4] & 63
        else:
            scale = (packed[i + 4] & 15) | ((packed[i - 4] >> 6) << 4)
            minimum = (packed[i + 4] >> 4) | ((packed[i] >> 6) << 4)
        each = codes[i // 2] >> 4 if i % 2 else codes[i // 2] & 15
        out += [d * np.float32(scale) * np.float32(q) - dmin * np.float32(minimum) for q in each]
    return out


ALPHABET = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]  # of bytes of ASCII, a space and a line feed


def byte_level(pre="smollm", **changes):
    """Return the fields of a byte-level tokenizer with two merges."""
    tokens = ["<|end|>", *ALPHABET, "he", "hel"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    } | changes


def sentence_piece(**changes):
    pieces = ["▁", "h", "e", "l", "o", "▁h", "he", "▁he", "ll", "llo", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [0.0] * 259 + [-50.0, -51.0, -52.0, -53.0, -54.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | changes


def architecture(name="llama", **changes):
    """Return the fields of a model of two layers."""
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 256}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    fields = {"general.architecture": name, **{f"{name}.{key}": value for key, value in (sizes | changes).items()}}
    return fields
