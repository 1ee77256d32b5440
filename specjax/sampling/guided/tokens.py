"""The bytes of the tokens of a vocabulary."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def vocabulary(tokenizer: "Tokenizer") -> list[bytes]:
    """Return the bytes of every token of a byte-level or SentencePiece tokenizer; special tokens have none.

    Raises:
        ValueError: the tokenizer is of another kind.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if "ByteLevel" in kinds:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

        def to_bytes(token: str) -> bytes:
            return bytes(byte_of[char] for char in token)

    elif kinds & {"ByteFallback", "Metaspace"}:

        def to_bytes(token: str) -> bytes:
            is_byte = len(token) == 6 and token.startswith("<0x")
            return bytes([int(token[3:5], 16)]) if is_byte else token.replace("\u2581", " ").encode()

    else:
        raise ValueError(f"tokenizer must decode as ByteLevel, ByteFallback or Metaspace, got {sorted(kinds)}")

    added = tokenizer.get_added_tokens_decoder()
    ids = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    return [
        (b"" if added[i].special else added[i].content.encode()) if i in added else to_bytes(ids.get(i, ""))
        for i in range(max(ids) + 1)
    ]
