"""Grammars: their tables against the regular expressions they come from, and the text that follows them."""

import itertools
import json
import re
from operator import ge, gt, le, lt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import one_of

from specjax import SamplingParams, decode, guided, proposers, sampling, verifiers
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.sampling.guided.schemas import pattern_of
from specjax.sampling.guided.tables import Grammar

WORDS = ["yes", "no", "may", "be", " very", "12", "345", '": ', '{"', "ab", "bc", "abc", ", ", "é", "tr", "ue", "false"]
VOCABULARY = [bytes([byte]) for byte in b'abcdefghijklmnopqrstuvwxyz0123456789 ,:."{}-\n\xc3\xa9'] + [
    w.encode() for w in WORDS
]
VOCABULARY += [b"", b"</s>"]  # a special token, and the end
BYTES = [bytes([byte]) for byte in range(256)] + [b""]
WHOLE = {"type": "integer"}
V, EOS = len(VOCABULARY), len(VOCABULARY) - 1


def object_of(**properties):
    """The schema of an object with these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def from_regex(pattern):
    pytest.importorskip("outlines_core")
    return guided.from_regex(pattern, VOCABULARY, [EOS])


def next_states(grammar, state):
    """The tokens that a state allows, each with the state after it."""
    row = grammar.transitions[state, grammar.token_classes]
    return {token: row[token] for token in np.flatnonzero(row >= 0)}


def texts(grammar, size):
    """All texts of at most `size` bytes over a, b, c and newline that the grammar accepts."""
    found, todo = set(), [(0, b"")]
    for state, text in todo:
        for token, after in next_states(grammar, state).items():
            longer = text + VOCABULARY[token]
            if token == EOS:
                found.add(text.decode())
            elif len(longer) <= size and set(longer) <= set(b"abc\n"):
                todo.append((after, longer))
    return found


class TestFromRegex:
    @pytest.mark.parametrize(
        "pattern",
        [
            *("a|ab", "ab|a", "(a|ab)(c|bcb)?", "a*?b?", "a{2,3}?b?", "(a|b)*abb", "(?:a|ab)(?:|c)", "a|[a-c]{2}b?|"),
            *("", "a.c", ".*", "a*", "(a*)*", "[^a]*", "a\n?", "[ab]+(\n[ab]+)*", "(?i)AB?"),
        ],
    )
    def test_language(self, pattern):
        strings = ("".join(s) for size in range(5) for s in itertools.product("abc\n", repeat=size))
        assert texts(from_regex(pattern), 4) == {s for s in strings if re.fullmatch(pattern, s)}

    def test_tokens_are_read_byte_by_byte(self):
        grammar = from_regex("é[0-9]{3}")
        allowed = [VOCABULARY[token] for token in next_states(grammar, 0)]
        assert allowed == [b"\xc3", "é".encode()]

    def test_after_the_end_only_the_end(self):
        grammar = from_regex("ab?")
        state = next_states(grammar, 0)[VOCABULARY.index(b"ab")]
        assert list(next_states(grammar, state)) == [EOS]
        assert next_states(grammar, next_states(grammar, state)[EOS]) == {EOS: next_states(grammar, state)[EOS]}

    def test_what_the_vocabulary_cannot_end_is_not_begun(self):
        grammar = from_regex("aX|b|(c+Z)")  # no token has an X or Z
        assert {VOCABULARY[token] for token in next_states(grammar, 0)} == {b"b"}

    def test_several_stop_tokens(self):
        pytest.importorskip("outlines_core")
        grammar = guided.from_regex("a", [b"a", b"b", b"", b"a"], [1, 2])
        assert list(next_states(grammar, 0)) == [0, 3]
        assert list(next_states(grammar, next_states(grammar, 0)[3])) == [1, 2]

    def test_tables_are_small(self):
        pytest.importorskip("outlines_core")
        pieces = [b"%d" % i for i in range(10000)] + [b"x%d" % i for i in range(10000)] + [b""]
        grammar = guided.from_regex("[0-9]+(x[0-9]+)?", pieces, [20000])
        assert grammar.token_classes.shape == (20001,) and grammar.transitions.shape[1] < 10

    @pytest.mark.parametrize("pattern", ["[", "a)(b", "*a", "a\\", "^a$", "a(?=b)", r"(a)\1", "X", r"[^\s\S]"])
    def test_bad_pattern(self, pattern):
        with pytest.raises(ValueError, match="pattern must"):
            from_regex(pattern)

    @pytest.mark.parametrize("eos", [[], [V], [-1]])
    def test_bad_stop_tokens(self, eos):
        with pytest.raises(ValueError, match="eos_token_ids must be one or more ids in"):
            guided.from_choices(["a"], VOCABULARY, eos)

    def test_json_schema(self):
        pytest.importorskip("outlines_core")
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["yes", "no"]}}}
        grammar = guided.from_json_schema(schema | {"required": ["a", "b"]}, VOCABULARY, [EOS])
        rng = np.random.default_rng(0)
        for _ in range(50):
            value = json.loads(walk(grammar, rng))
            assert set(value) == {"a", "b"} and value["a"] in (True, False) and value["b"] in ("yes", "no")

    @pytest.mark.parametrize(
        ("schema", "good", "bad"),
        [
            ({}, ["1", '"a"', '{"a": [1]}', "[[1], true]"], ["a", '{"a": 1']),
            (object_of(a={}, b=True), ['{"a": {"c": [null]}, "b": 1}'], ["null", '{"a": true']),
            (object_of(a={"description": "free"}), ['{"a": [1, "b"]}'], ["[]"]),
            ({"additionalProperties": {}}, ['{"a": 1, "b": {}}', "{}"], ["1"]),
            (
                {"allOf": [object_of(a=WHOLE), {"$ref": "#/$defs/b"}], "$defs": {"b": object_of(b=WHOLE)}},
                ['{"a":1,"b":2}'],
                ['{"a":1}{"b":2}'],
            ),
            (object_of(**{'say "a"': WHOLE}), [r'{"say \"a\"": 1}'], ['{"say "a"": 1}']),
            ({"type": "string", "pattern": "^.+$"}, ['"a b"', '"é"'], ['"a"b"', '"a\\"', '""']),
            ({"type": "string", "pattern": "^[^a]|b\\S$"}, ['"x"', '"bc"'], ['"a"', '"""', '"b""']),
            ({"type": "string", "pattern": '^a"\\\\$'}, [r'"a\"\\"'], ['"a"']),
            ({"type": "string", "pattern": "^[[\\]x]$"}, ['"["', '"]"'], ['"y"']),
            ({"type": "string", "pattern": r"^\d[\W_]\w$"}, ['"1-a"', '"1__"'], ['"१-a"', '"1-é"', '"1"a"']),
            ({"type": "string", "format": "email"}, ['"a.b@c.de"'], ['"a"', '""a"@c.de"']),
            ({"type": "string", "format": "email", "pattern": "^(?!x).*$"}, ['"a.b@c.de"'], ['"a"']),
            ({"type": "string", "format": "uri"}, ['"http://a.b/c?d"', '"urn:a"'], ['"a b:c"']),
            (
                {"type": "string", "format": "time"},
                ['"01:02:03"', '"01:02:03.5+02:00"'],
                ['"25:00:00"', r'"01:02:03\x5"'],
            ),
            ({"type": "string", "format": "date-time"}, ['"2024-01-31T01:02:03Z"'], ['"2024-13-01T01:02:03Z"']),
            ({"type": "string", "format": "int-or-path"}, ['"a"'], ["a"]),
            (object_of(a=WHOLE) | {"type": ["object", "null"]}, ["null", '{"a": 1}'], ["{}", "1"]),
            ({"type": ["integer", "string"], "minimum": 3, "maxLength": 1}, ["3", '"a"'], ["2", '"ab"']),
            ({"minimum": 3}, ["3", "4.5"], ["2", '"a"']),
            ({"type": "string", "pattern": "^a/.$"}, ['"a/b"', r'"a/\""', r'"a/\\"', r'"a/\t"'], [r'"a/\n"', '"a/""']),
            ({"type": "string", "pattern": r"^[\n&&x]\S$"}, [r'"\n\""', '"&y"'], [r'"a\n"', r'"\n\n"']),
            ({"type": "string", "pattern": r"^\x22\u005c\n|\u{41}|\v$"}, ['"A"', r'"\"\\\n"'], ['""\\n"', '"\v"']),
            ({"type": "string", "pattern": "^https?://"}, ['"http://a.b"', r'"https://\n"'], ['"ftp://a.b"']),
            ({"type": "string", "pattern": "^$|^(a|b)$|^c"}, ['""', '"b"', '"c1"'], ['"a1"', '"1"', '"1c"']),
            ({"type": "string", "pattern": r"\.py$"}, ['"a.py"', '".py"'], ['"a.pyc"']),
            (object_of(a=WHOLE) | {"allOf": [object_of(a=WHOLE, b=WHOLE)]}, ['{"a":1,"b":2}'], ['{"a":1}']),
            (object_of(a=WHOLE) | {"allOf": [{"required": ["b"]}, {"if": {}}]}, ['{"a":1,"b":[]}'], ['{"a":1}']),
            ({"type": "object", "required": ["a"], "additionalProperties": WHOLE}, ['{"a":1}'], ["{}", '{"a":""}']),
            ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
            ({"type": "array", "prefixItems": [WHOLE, {"type": "null"}], "items": False}, ["[1, null]"], ["[]", "[1]"]),
        ],
    )
    def test_json_of_a_schema(self, schema, good, bad):
        """Texts of the schema follow the grammar, and those that are none, or no JSON, do not."""
        pytest.importorskip("outlines_core")
        grammar = guided.from_json_schema(schema, BYTES, [256])
        assert [accepts(grammar, text) for text in good] == [True] * len(good)
        assert [accepts(grammar, text) for text in bad] == [False] * len(bad)

    @pytest.mark.parametrize("kind", ["integer", "number"])
    @pytest.mark.parametrize(
        "bounds",
        [
            *({"minimum": 0}, {"maximum": -2}, {"minimum": 1, "maximum": 5}, {"minimum": -9, "maximum": 11}),
            *({"minimum": 0, "maximum": 1}, {"exclusiveMinimum": 0}, {"exclusiveMinimum": -1, "exclusiveMaximum": 10}),
            *({"minimum": 0, "exclusiveMinimum": True}, {"minimum": 0.5}, {"exclusiveMaximum": 0.5}, {"maximum": -1.5}),
            *({"minimum": -1.05, "exclusiveMaximum": 2.5}, {"exclusiveMinimum": 0.01, "maximum": 1.01}),
            *({"minimum": 9, "maximum": 10**12}, {"exclusiveMaximum": 0}, {"minimum": 7, "maximum": 7}),
        ],
    )
    def test_bounds_of_numbers(self, kind, bounds):
        pytest.importorskip("outlines_core")
        texts = [
            f"{sign}{whole}{rest}"
            for sign in ("", "-")
            for whole in range(13)
            for rest in ("", ".0", ".5", ".01", ".49", ".050")
        ]
        texts = [text for text in texts if float(text) or text[0] != "-"]  # a negative zero need not be there
        texts = [text for text in texts if kind == "number" or "." not in text]
        holds = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
        if bounds.get("exclusiveMinimum") is True:
            holds["minimum"] = gt  # as old schemas have it
        told = [(holds[name], bound) for name, bound in bounds.items() if bound is not True]
        expected = [all(is_right(float(text), bound) for is_right, bound in told) for text in texts]
        pattern = re.compile(pattern_of({"type": kind} | bounds))
        found = [bool(pattern.fullmatch(text)) for text in texts]
        assert found == expected

    def test_far_bounds_make_a_small_grammar(self):
        """Some clients bound every integer by those that a float has exactly."""
        pytest.importorskip("outlines_core")
        grammar = guided.from_json_schema(WHOLE | {"minimum": 1 - 2**53, "maximum": 2**53 - 1}, BYTES, [256])
        assert len(grammar.transitions) < 50
        assert accepts(grammar, str(10**15 - 1)) and accepts(grammar, str(1 - 10**15))
        assert not accepts(grammar, str(2**53))

    def test_bounds_that_are_all_far(self):
        pytest.importorskip("outlines_core")
        pattern = re.compile(pattern_of(WHOLE | {"minimum": 10**15, "maximum": 2**60}))
        found = [bool(pattern.fullmatch(str(value))) for value in (10**15 - 1, 10**15, 2**60, 2**60 + 1)]
        assert found == [False, True, True, False]

    @pytest.mark.parametrize(
        ("schema", "told"),
        [
            ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum of at most its maximum 1, got 2"),
            ({"type": "number", "minimum": 1, "exclusiveMaximum": 1}, "minimum of at most its maximum 1, got 1"),
            ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "schemas of objects"),
            ({"allOf": [object_of(a=WHOLE), object_of(a={"type": "null"})]}, "two schemas of 'a'"),
            ({"allOf": [{"minLength": 1}, object_of(a=WHOLE)]}, "schemas of objects"),
            ({"allOf": [{"properties": [1]}, object_of(a=WHOLE)]}, "schemas of objects"),
            ({"allOf": [object_of(a=WHOLE) | {"required": 5}, {}]}, "schemas of objects"),
            ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, "of few levels"),
            ({"type": "string", "pattern": "a)|(b"}, r"pattern must be a regular expression, got 'a\)\|\(b'"),
            ({"anyOf": []}, "anyOf must hold one or more"),
            ({"type": "object", "required": ["a"], "additionalProperties": False}, "required must name properties"),
            ({"minimum": float("inf")}, "finite numbers"),
            ({"default": {1}}, "values of JSON"),
            ({"properties": {"a": False}}, "must allow a value"),
            ({"properties": [1]}, "properties"),
            ({"items": 5}, "Unsupported"),
        ],
    )
    def test_refused_schemas(self, schema, told):
        pytest.importorskip("outlines_core")
        with pytest.raises(ValueError, match=told):
            guided.from_json_schema(schema, BYTES, [256])


def accepts(grammar, text):
    """Whether a grammar over bytes accepts a text."""
    state = 0
    for byte in [*text.encode(), 256]:
        state = grammar.transitions[state, grammar.token_classes[byte]]
        if state < 0:
            return False
    return True


def walk(grammar, rng):
    """A text by a random walk."""
    state, text = 0, b""
    while True:
        token, state = rng.choice(list(next_states(grammar, state).items()))
        if token == EOS:
            return text.decode()
        text += VOCABULARY[token]


class TestFromChoices:
    def test_texts(self):
        grammar = guided.from_choices(["yes", "no", "a.*", "maybe", "may", "é\n"], VOCABULARY, [EOS])
        rng = np.random.default_rng(0)
        with pytest.raises(ValueError, match="choices must match"):
            guided.from_choices(["X"], VOCABULARY, [EOS])
        assert {walk(grammar, rng) for _ in range(300)} == {"yes", "no", "maybe", "may", "é\n"}  # there is no *

    @pytest.mark.parametrize("choices", [[], "yes", [1]])
    def test_bad_choices(self, choices):
        with pytest.raises(ValueError, match="choices must be a non-empty sequence of strings, got"):
            guided.from_choices(choices, VOCABULARY, [EOS])


class TestGrammar:
    @pytest.mark.parametrize(
        ("classes", "transitions", "message"),
        [
            ([[0]], [[0]], r"token_classes \[V\] must be non-empty integers"),
            ([0], [0], r"transitions \[S, C\] must be non-empty integers"),
            ([0], np.zeros((0, 1), int), r"transitions \[S, C\] must be"),
            ([0.5], [[0]], r"token_classes \[V\] must be non-empty integers"),
            ([0, 2], [[0, 0]], r"token_classes must be in \[0, 2\), got 0 to 2"),
            ([0, -1], [[0, 0]], r"token_classes must be in \[0, 2\), got -1 to 0"),
            ([0, 0], [[1]], r"transitions must be in \[-1, 1\), got 1 to 1"),
            ([0, 0], [[-2]], r"transitions must be in \[-1, 1\), got -2 to -2"),
            ([0, 0], [[1, 0], [-1, 0]], "transitions must allow a token in every state, got none in state 1"),
        ],
    )
    def test_bad_tables(self, classes, transitions, message):
        with pytest.raises(ValueError, match=message):
            Grammar(classes, transitions)

    def test_batch(self):
        """Rows advance as their own grammars say, in one table of few sizes."""
        one, two = Grammar([0, 1, 2], [[1, -1, 0], [-1, 0, 1]]), Grammar([0, 0, 1, 1], [[0, 1], [1, -1]])
        guide = guided.batch([one, None, two, one])
        assert jax.tree.map(jnp.shape, guide) == guided.Guide((4, 4), (8, 4), (4,), (4,))
        tokens = jnp.array([[0, 1, 1, 0], [3, 3, 0, 1], [0, 3, 3, 1], [1, -1, 2, 0]])
        states = np.asarray(guided.advance(guide, guide.initial, tokens))
        assert states.tolist() == [[1, 2, 1, 1, 2], [0] * 5, [3, 3, 4, 4, 4], [1, 1, 1, 1, 2]]
        allowed = np.asarray(guided.allowed(guide, jnp.asarray(states[:, :3])))
        assert allowed[0].tolist() == [
            [True, False, True, False],
            [False, True, True, False],
            [True, False, True, False],
        ]
        assert allowed[1].all()
        assert allowed[2].tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]

    def test_no_grammar_is_none(self):
        assert guided.batch([None, None]) is None

    def test_unknown_tokens_are_forbidden(self):
        guide = guided.batch([Grammar([0, 0], [[0]]), None], vocab_size=4)
        allowed = guided.allowed(guide, guide.initial[:, None])
        assert allowed[:, 0].tolist() == [[True, True, False, False], [True] * 4]

    def test_vocabularies_differ(self):
        grammar = Grammar([0, 0, 0], [[0]])
        with pytest.raises(ValueError, match="guided_decoding must have at most vocab_size = 2 tokens, got 3"):
            guided.batch([grammar], vocab_size=2)
        rows = sampling.batch([SamplingParams(guided_decoding=grammar)])
        context = decode.Context(jnp.zeros((1, 4), jnp.int32), jnp.array([1]), jnp.array([True]))
        with pytest.raises(ValueError, match="guided_decoding must be of V = 5 tokens, got 3"):
            sampling.process(rows, jnp.zeros((1, 1, 5)), context, jnp.zeros((1, 0), jnp.int32))
        with pytest.raises(ValueError, match=r"context must have a guided_state \[B\]"):
            sampling.process(rows, jnp.zeros((1, 1, 3)), context, jnp.zeros((1, 0), jnp.int32))


class TestVocabulary:
    TEXT = "the café: 12 → {x}\n\n\tend 🙂"

    def test_byte_level(self):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([self.TEXT] * 4, trainer)
        tokenizer.add_tokens(["<tool é>"])
        vocabulary = guided.vocabulary(tokenizer)
        assert len(vocabulary) == tokenizer.get_vocab_size() and vocabulary[0] == b""
        ids = tokenizer.encode(self.TEXT + "<tool é>").ids
        assert b"".join(vocabulary[i] for i in ids).decode() == self.TEXT + "<tool é>"

    def test_sentencepiece(self):
        from tokenizers import Tokenizer, decoders, models, normalizers

        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz", "é"]
        model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        vocabulary = guided.vocabulary(tokenizer)
        assert b"".join(vocabulary[i] for i in tokenizer.encode(self.TEXT).ids).decode() == self.TEXT

    def test_other(self):
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
        for decoder, kinds in ((None, r"\[\]"), (decoders.WordPiece(), "'WordPiece'")):
            tokenizer.decoder = decoder
            with pytest.raises(ValueError, match=f"tokenizer must decode as ByteLevel, .* got .*{kinds}"):
                guided.vocabulary(tokenizer)


CONFIG = DecoderConfig(
    vocab_size=V, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=32, max_length=64
)
PATTERNS = [
    r"[0-9]{1,3}(,[0-9]{2,3}){0,4}",
    "(yes|no|maybe)( very){0,3}",
    r'\{"a": (true|false), "b": "[a-c]{0,5}é?"\}',
]
CHOICES = ["yes", "no", "may", "maybe"]
prefill = jax.jit(decode.prefill, static_argnames="max_length")


@pytest.fixture(scope="module")
def models():
    params = init_params(CONFIG, 0)
    params["embedding"] = 40 * params["embedding"]  # logits of some size
    noisy = jax.tree.map(lambda x: x + 0.3 * jnp.std(x) * jax.random.normal(jax.random.key(1), x.shape), params)
    return decoder_model(CONFIG, params), decoder_model(CONFIG, noisy)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "rejection", "block", "match"])
def test_text_follows_the_grammar(models, name):
    """Requests with several grammars and without one, greedy and sampled, in one batch."""
    pytest.importorskip("outlines_core")
    grammars = {pattern: from_regex(pattern) for pattern in PATTERNS}
    grammars["|".join(CHOICES)] = guided.from_choices(CHOICES, VOCABULARY, [EOS])
    cases = [(pattern, temperature) for pattern in [*grammars, None] for temperature in (0, 1, 1)]
    params = [
        SamplingParams(temperature=t, max_tokens=40, min_tokens=2, guided_decoding=grammars.get(pattern))
        for pattern, t in cases
    ]
    rows = sampling.batch(params, [EOS], V)
    target, draft = models
    proposer = None if name is None else proposers.draft_model(draft, 3)
    verifier = verifiers.rejection if name is None else one_of(name)
    size = len(params)
    texts, accepted = set(), 0
    for seed in range(8):
        keys = jax.random.split(jax.random.key(seed), size)
        prompts = jnp.broadcast_to(jnp.array([5, seed]), (size, 2))
        state = prefill(target, proposer, prompts, jnp.full(size, 2), rows, keys, max_length=48)
        state = jax.device_get(decode.generate(target, proposer, state, verifier=verifier))
        accepted += int(state.totals.accepted.sum())
        for (pattern, _), tokens, length, finished in zip(
            cases, state.context.tokens.tolist(), state.context.length, state.finished, strict=True
        ):
            if pattern is not None:
                text = b"".join(VOCABULARY[token] for token in tokens[2 : length - 1]).decode()
                assert finished == decode.STOP and tokens[length - 1] == EOS
                assert re.fullmatch(pattern, text)
                texts.add(text)
    assert len(texts) > 20
    assert name is None or accepted > 20


class TestSources:
    def test_they_compile_to_what_their_functions_make(self):
        for source, grammar in (
            (guided.Choices(["yes", "no"]), guided.from_choices(["yes", "no"], VOCABULARY, [EOS])),
            (guided.Regex("(ab|c)+"), from_regex("(ab|c)+")),
        ):
            compiled = source.compile(VOCABULARY, [EOS])
            np.testing.assert_array_equal(compiled.token_classes, grammar.token_classes)
            np.testing.assert_array_equal(compiled.transitions, grammar.transitions)
        schema = {"type": "boolean"}
        assert guided.JsonSchema(schema) == guided.JsonSchema(json.dumps(schema))
        assert len({guided.Choices(["a"]), guided.Choices(("a",)), guided.Regex("a")}) == 2

    @pytest.mark.parametrize(
        "make, message",
        [
            (lambda: guided.Regex(3), "pattern must be a string, got 3"),
            (lambda: guided.Choices("yes"), "texts must be a non-empty sequence of strings, got 'yes'"),
            (lambda: guided.Choices([]), r"texts must be a non-empty sequence of strings, got \[\]"),
            (lambda: guided.JsonSchema("[1]"), r"schema must be a mapping or the JSON text of one, got '\[1\]'"),
            (lambda: guided.JsonSchema("{"), "schema must be a JSON schema, got '{'"),
            (lambda: guided.JsonSchema({"a": {1}}), "schema must be a JSON schema, got "),
            (lambda: guided.JsonSchema("a" * 10**6), r"schema must be a JSON schema, got 'a{199}\.\.\.: Expecting"),
            (lambda: guided.JsonSchema(f'["{"a" * 300}"]'), r"mapping or the JSON text of one, got '\[\"a{197}\.\.\.$"),
        ],
    )
    def test_bad_ones_are_refused(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    def test_a_batch_takes_no_source(self):
        with pytest.raises(ValueError, match="guided_decoding must be compiled for a batch: a Grammar, got Choices"):
            sampling.batch([SamplingParams(guided_decoding=guided.Choices(["a"]))])
