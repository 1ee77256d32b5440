"""Grammars in tables of fixed sizes: they allow the same tokens as each grammar, whatever came and left before."""

import numpy as np
import pytest

from specjax.engine.grammars import GrammarTables
from specjax.sampling.capacities import Capacities
from specjax.sampling.guided import Grammar

VOCAB, CAPACITIES = 12, Capacities(grammars=3, grammar_states=10, grammar_classes=4)


def some_grammar(rng):
    """At random, of up to 5 states; the first class is allowed everywhere."""
    num_states, num_classes = rng.integers(1, 6), rng.integers(1, 5)
    transitions = rng.integers(-1, num_states, (num_states, num_classes))
    transitions[:, 0] = rng.integers(0, num_states, num_states)
    classes = rng.integers(0, num_classes, rng.integers(VOCAB - 3, VOCAB + 1))
    classes[0] = 0
    return Grammar(classes, transitions)


def walk(token_classes, transitions, state, tokens):
    """The states before and after the tokens, of which forbidden ones change nothing, and what each state allows."""
    states = [int(state)]
    for token in tokens:
        after = int(transitions[states[-1], token_classes[token]])
        states.append(states[-1] if after < 0 else after)
    return np.array(states), transitions[states][:, token_classes] >= 0


def check(tables, grammar, rng):
    """Walk through the tables, from the state after some tokens on, and through the grammar alone."""
    known = len(grammar.token_classes)
    tokens = rng.integers(0, known, 11)
    place, first = (tables.guide(grammar, tokens[:n]) for n in (5, 0))
    given = tables.token_classes[place.grammar], tables.transitions, place.initial, tokens[5:]
    states, allowed = walk(*given)
    expected, expected_allowed = walk(grammar.token_classes, grammar.transitions, 0, tokens)
    np.testing.assert_array_equal(states - first.initial, expected[5:])
    np.testing.assert_array_equal(allowed[:, :known], expected_allowed[5:])
    assert not allowed[:, known:].any()


def test_any_order():
    rng = np.random.default_rng(0)
    tables, grammars, live, num_refused = GrammarTables(CAPACITIES, VOCAB), [some_grammar(rng) for _ in range(8)], [], 0
    for _ in range(150):
        if live and rng.random() < 0.4:
            tables.remove(live.pop(rng.integers(len(live))))
        else:
            grammar = grammars[rng.integers(len(grammars))]
            if tables.insert(grammar):
                live.append(grammar)
                check(tables, grammar, rng)
            else:
                num_refused += 1
                assert grammar not in live and len(live) > 0
        assert (tables.transitions[0] == 0).all() and (tables.token_classes[0] == 0).all()
    assert num_refused > 5
    for grammar in live:
        check(tables, grammar, rng)


def test_those_that_are_used_stay_and_the_others_go_when_their_place_is_needed():
    rng, tables = np.random.default_rng(1), GrammarTables(CAPACITIES, VOCAB)
    first, second, third, fourth = (Grammar(np.zeros(VOCAB, int), np.zeros((3, 1), int)) for _ in range(4))
    assert all(map(tables.insert, (first, second, third)))
    assert not tables.insert(fourth)
    tables.remove(second)
    place = tables.guide(second, np.zeros(0, np.int32))
    assert tables.insert(second) and tables.guide(second, np.zeros(0, np.int32)) == place
    tables.remove(second)
    assert tables.insert(fourth) and tables.guide(fourth, np.zeros(0, np.int32)).grammar == place.grammar
    for grammar in (first, third, fourth):
        check(tables, grammar, rng)
    tables.remove(fourth)
    for grammar in (second, fourth):
        with pytest.raises(ValueError, match="no request uses the grammar"):
            tables.remove(grammar)


def test_a_token_that_a_grammar_does_not_know_changes_no_state():
    """As on the device. Such a token follows where the other parameters forbid all that the grammar allows."""
    tables = GrammarTables(CAPACITIES, VOCAB)
    grammar = Grammar(np.array([0, 1]), np.array([[1, -1], [1, 0]]))
    assert tables.insert(grammar) and grammar in tables
    known, unknown = (tables.guide(grammar, np.array(ids, np.int32)) for ids in ([0], [0, VOCAB - 1]))
    assert int(known.initial) == int(unknown.initial) == int(tables.guide(grammar, np.zeros(0, np.int32)).initial) + 1
