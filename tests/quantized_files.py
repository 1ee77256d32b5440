"""Matrices in the layouts of quantised checkpoints: arrays as the files hold them, and the matrix by the formula.

Codes are packed one at a time, so that nothing is shared with the code that reads them.
"""

import json

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def pack_words(codes, bits, axis):
    """Return codes in int32 words along an axis, code i at bits i * bits."""
    codes = np.moveaxis(np.asarray(codes), axis, -1)
    number = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // number)), np.uint32)
    for i in range(codes.shape[-1]):
        words[..., i // number] |= codes[..., i].astype(np.uint32) << np.uint32(bits * (i % number))
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def pack_bytes(codes, high_first=False):
    """Return codes of 4 bits in bytes, the first of two in the lower half unless `high_first`."""
    codes = np.asarray(codes, np.uint8)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    first, second = codes[..., ::2], codes[..., 1::2]
    return (first << 4) | second if high_first else first | (second << 4)


def scales(rng, shape, dtype=np.float16):
    return rng.uniform(0.001, 0.02, shape).astype(dtype)


def of_group(x, groups):
    """Return x [N, groups] at the group of each input."""
    return np.asarray(x)[:, groups].astype(np.float32)


def gptq(rng, n, k, group, bits=4, *, version=1, symmetric=False, order=False, stored_zero=None):
    """Return arrays and matrix; `version` is of the zeros, `stored_zero` overrides the stored zero of each.

    `order` is whether groups are of inputs that lie apart, or the generator that draws which.
    """
    size = k if group == -1 else group
    groups = np.arange(k) // size
    if order:
        groups = (rng if order is True else order).permutation(groups)
    number = groups.max() + 1
    q, s = rng.integers(0, 2**bits, (n, k)), scales(rng, (n, number))
    z = np.full((n, number), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (n, number))
    stored = z - 1 if version == 1 else z
    stored = stored if stored_zero is None else np.full_like(stored, stored_zero)
    arrays = {
        "qweight": pack_words(q.T, bits, 0),
        "qzeros": pack_words(stored.T, bits, 1),
        "scales": np.ascontiguousarray(s.T),
        "g_idx": groups.astype(np.int32),
    }
    return arrays, (q - of_group(z, groups)).astype(np.float32) * of_group(s, groups)


def awq(rng, n, k, group, symmetric=False):
    size = k if group == -1 else group
    groups = np.arange(k) // size
    number = groups[-1] + 1
    q, z, s = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, number)), scales(rng, (n, number))
    z = np.full_like(z, 8) if symmetric else z

    def packed(codes):  # [rows, N]; the output that each place of a word has
        codes = np.pad(codes, ((0, 0), (0, -n % 8))).reshape(len(codes), -1, 8)
        return pack_words(codes[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(codes), -1), 4, 1)

    arrays = {"qweight": packed(q.T), "qzeros": packed(z.T), "scales": np.ascontiguousarray(s.T)}
    return arrays, (q - of_group(z, groups)).astype(np.float32) * of_group(s, groups)


def e4m3(rng, shape):
    return rng.normal(0, 60, shape).clip(-448, 448).astype(E4M3)


def fp8(rng, n, k, block=None, name="weight_scale_inv", shape=(), dtype=np.float32):
    """Return a matrix with scales of blocks, or without `block` with scales of this shape."""
    w = e4m3(rng, (n, k))
    if block is None:
        s = scales(rng, shape, dtype)
        whole = np.broadcast_to(s.astype(np.float32).reshape(-1, 1), (n, k))
    else:
        s = scales(rng, (-(-n // block[0]), -(-k // block[1])), dtype)
        whole = s.astype(np.float32)[np.arange(n)[:, None] // block[0], np.arange(k)[None] // block[1]]
    return {"weight": w, name: s}, w.astype(np.float32) * whole


def fp8_stack(rng, experts, n, k, shape, block=None):
    """Return a stack of matrices of e4m3 with scales of this shape, of matrices, of parts of them or of blocks."""
    w, s = e4m3(rng, (experts, n, k)), scales(rng, shape, np.float32)
    rows, columns = (n // s.reshape(experts, -1).shape[1], k) if block is None else block
    wide = s.reshape(experts, -(-n // rows), -(-k // columns))
    whole = wide[:, np.arange(n)[:, None] // rows, np.arange(k)[None] // columns]
    return {"": w, "_scale_inv": s}, w.astype(np.float32) * whole


def mxfp4(rng, n, k, experts=None):
    """Return `_blocks` and `_scales`; with experts, of a stack."""
    outer = (n,) if experts is None else (experts, n)
    q, s = rng.integers(0, 16, (*outer, k)), rng.integers(110, 130, (*outer, k // 32)).astype(np.uint8)
    blocks = pack_bytes(q).reshape(*outer, k // 32, 16)
    w = E2M1[q] * np.repeat(np.exp2(s.astype(np.float32) - 127), 32, axis=-1)
    return {"_blocks": blocks, "_scales": s}, w


def nvfp4(rng, n, k, tool):
    """Return a matrix as "modelopt" or "compressed-tensors" writes it."""
    q, s = rng.integers(0, 16, (n, k)), rng.uniform(1, 300, (n, -(-k // 16))).astype(E4M3)
    s[0, 0] = 0  # of a group that is too small for its scale
    whole = np.float32(2.7e-4)
    wide = np.repeat(s.astype(np.float32), 16, axis=1)[:, :k]
    if tool == "modelopt":
        return {"weight": pack_bytes(q), "weight_scale": s, "weight_scale_2": whole}, E2M1[q] * (wide * whole)
    whole = np.float32([1 / whole])
    arrays = {"weight_packed": pack_bytes(q), "weight_scale": s, "weight_global_scale": whole}
    return arrays, E2M1[q] * (wide / whole)


def nvfp4_stack(rng, experts, n, k, inputs_first=True):
    """Return a stack with the inputs of a matrix first, as ModelOpt writes it for Llama 4, or with the outputs."""
    q, s = rng.integers(0, 16, (experts, n, k)), rng.uniform(1, 300, (experts, n, -(-k // 16))).astype(E4M3)
    s[0, 0, 0] = 0
    whole = np.float32(2.7e-4)
    w = E2M1[q] * (np.repeat(s.astype(np.float32), 16, axis=2)[..., :k] * whole)
    arrays = {"": pack_bytes(q), "_weight_scale": s}
    if inputs_first:
        arrays = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in arrays.items()}
    return arrays | {"_weight_scale_2": whole}, w


def fp8_stack_of_outputs(rng, experts, n, k, shape, ending="_weight_scale"):
    """Return a stack of e4m3 with the inputs of a matrix first, with scales of this shape, of outputs or of all."""
    w, s = e4m3(rng, (experts, n, k)), scales(rng, shape, np.float32)
    wide = s if s.ndim == 0 else s.reshape(experts, -1, 1)
    return {"": np.ascontiguousarray(w.swapaxes(1, 2)), ending: s}, w.astype(np.float32) * wide


def packed(rng, n, k, group, *, bits=4, symmetric=True, order=False, dtype=ml_dtypes.bfloat16):
    """Return a matrix of compressed-tensors' pack-quantized; a group of None is one scale for an output."""
    groups = np.arange(k) // (group or k)
    if order:
        groups = rng.permutation(groups)
    number, middle = groups.max() + 1, 2 ** (bits - 1)
    q, s = rng.integers(-middle, middle, (n, k)), scales(rng, (n, number), dtype)
    z = np.zeros((n, number), int) if symmetric else rng.integers(-middle, middle, (n, number))
    arrays = {
        "weight_packed": pack_words(q + middle, bits, 1),
        "weight_scale": s,
        "weight_shape": np.array([n, k], np.int64),
    }
    if not symmetric:
        arrays["weight_zero_point"] = pack_words(z + middle, bits, 0)
    if order:
        arrays["weight_g_idx"] = groups.astype(np.int32)
    return arrays, (q - of_group(z, groups)).astype(np.float32) * of_group(s, groups)


def int8(rng, n, k, group=None, symmetric=True, bits=8):
    groups, middle = np.arange(k) // (group or k), 2 ** (bits - 1)
    q, s = rng.integers(-middle, middle, (n, k)).astype(np.int8), scales(rng, (n, groups[-1] + 1), ml_dtypes.bfloat16)
    z = rng.integers(-5, 5, s.shape).astype(np.int8) if not symmetric else np.zeros(s.shape, np.int8)
    arrays = {"weight": q, "weight_scale": s} | ({} if symmetric else {"weight_zero_point": z})
    return arrays, (q.astype(np.float32) - of_group(z, groups)) * of_group(s, groups)


def mxfp4_packed(rng, n, k, name="weight_packed"):
    q, s = rng.integers(0, 16, (n, k)), rng.integers(100, 140, (n, -(-k // 32))).astype(np.uint8)
    wide = np.repeat(np.ldexp(np.float32(1), s.astype(int) - 127), 32, axis=1)[:, :k]
    return {name: pack_bytes(q), "weight_scale": s}, (E2M1[q] * wide).astype(np.float32)


def mxfp8(rng, n, k):
    w, s = e4m3(rng, (n, k)), rng.integers(110, 130, (n, -(-k // 32))).astype(np.uint8)
    wide = np.repeat(np.ldexp(np.float32(1), s.astype(int) - 127), 32, axis=1)[:, :k]
    return {"weight": w, "weight_scale": s}, w.astype(np.float32) * wide


def bits4(rng, n, k, table, nested, kind="nf4", block=64):
    """Return a matrix of 4 bits as bitsandbytes writes it, of the kind "nf4" or "fp4"."""
    q = rng.integers(0, 16, n * k)
    number = -(-n * k // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    arrays = {"weight": pack_bytes(q, high_first=True)[:, None], "weight.quant_map": table}
    if nested:
        codes = rng.integers(0, 256, number).astype(np.uint8)
        outer_map = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = scales(rng, -(-number // 256), np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0423}
        absmax = outer_map[codes] * outer[np.arange(number) // 256] + np.float32(0.0423)
        arrays |= {
            "weight.absmax": codes,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": outer_map,
        }
    else:
        absmax = scales(rng, number, np.float32)
        absmax[1] = 0  # of a block of zeros
        q[block : 2 * block] = np.flatnonzero(table == 0)[0]
        arrays |= {"weight": pack_bytes(q, high_first=True)[:, None], "weight.absmax": absmax}
    arrays[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return arrays, (table[q] * absmax[np.arange(n * k) // block]).reshape(n, k)


def llm_int8(rng, n, k):
    q, largest = rng.integers(-127, 128, (n, k)).astype(np.int8), rng.uniform(0.1, 2, n).astype(np.float32)
    arrays = {"weight": q, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return arrays, q.astype(np.float32) * (largest / np.float32(127))[:, None]


def torchao(rng, n, k, shape, is_int=False, has_zeros=False):
    """Return a matrix of e4m3 or int8 with scales of this shape, each of as many outputs and inputs."""
    s = scales(rng, shape, np.float32)
    grid = s.reshape(*(1, 1) if s.ndim == 0 else (len(s), -1))
    at = np.arange(n)[:, None] * grid.shape[0] // n, np.arange(k)[None] * grid.shape[1] // k
    q = rng.integers(-128, 128, (n, k)).astype(np.int8) if is_int else e4m3(rng, (n, k))
    z = rng.integers(-9, 9, grid.shape).astype(np.int8) if has_zeros else np.zeros(grid.shape, np.int8)
    arrays = {"_weight_qdata": q, "_weight_scale": s} | ({"_weight_zero_point": z.reshape(shape)} if has_zeros else {})
    return arrays, (q.astype(np.float32) - z[at].astype(np.float32)) * grid[at]
