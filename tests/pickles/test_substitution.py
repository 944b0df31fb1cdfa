"""Nodes replaced everywhere at once: in containers of every kind, shared, nested and cyclic, in
bounded time.
"""

from __future__ import annotations

import time

import pytest

from ckptconv.pickles.nodes import Call, Dict, Global, calls_of, substituted

SET = Global("builtins", "set")


def replaced(root, old, new):
    return substituted(root, {id(old): new})


def test_a_node_is_replaced_wherever_it_stands():
    old = Call(SET, ())
    holder = Call(SET, (old, 1))
    holder.items, holder.pairs, holder.state = [old], [("k", old)], (old,)
    root = Dict(
        [("list", [old, 2]), ("tuple", (old, (old,))), (old, "key"), ("call", holder), ("one", old)]
    )
    made = replaced(root, old, "new")
    pairs = dict(made.pairs)
    assert pairs["list"] == ["new", 2]
    assert pairs["tuple"] == ("new", ("new",))
    assert pairs["new"] == "key" and pairs["one"] == "new"
    call = pairs["call"]
    assert (call.func, call.args, call.items, call.pairs, call.state) == (
        SET,
        ("new", 1),
        ["new"],
        [("k", "new")],
        ("new",),
    )
    assert replaced(old, old, "new") == "new"


def test_shared_containers_stay_one_object_and_untouched_ones_the_same():
    old, other, plain = Call(SET, ()), (1, 2), Dict([("k", "v")])
    shared = (old, other)
    root = replaced([shared, plain, (shared,), other], old, "new")
    assert root[0] == ("new", (1, 2))
    assert root[0] is root[2][0]
    assert root[0][1] is other and root[3] is other and root[1] is plain


def test_the_tree_stays_as_it_was():
    old = Call(SET, ())
    inner, holder = [old], Call(SET, (old,))
    holder.state = Dict([("k", old), ("inner", inner)])
    root = Dict([("a", inner), ("b", (holder,))])
    made = replaced(root, old, "new")
    assert made is not root and dict(made.pairs)["a"] == ["new"]
    assert inner == [old] and holder.args == (old,) and holder.state.pairs[0] == ("k", old)
    assert [value for _, value in root.pairs] == [inner, (holder,)]


def test_containers_that_hold_themselves_are_entered_once():
    old = Call(SET, ())
    root: list = [old]
    inner = (root, old)
    root.append(inner)
    root = replaced(root, old, "new")
    assert root[0] == "new" and root[1][0] is root and root[1][1] == "new"


@pytest.mark.parametrize("order", [1, -1])
def test_tuples_within_tuples_take_one_step_each(order):
    """Whatever the order in which they are met: a chain of n tuples must not take n rounds."""
    old = Call(SET, ())
    chain = [(old,)]
    for _ in range(20_000):
        chain.append((chain[-1],))
    root = chain[::order]
    begin = time.process_time()
    root = replaced(root, old, "new")
    assert time.process_time() - begin < 2
    node = root[0] if order < 0 else root[-1]
    for _ in range(20_000):
        (node,) = node
    assert node == ("new",)


def test_tuples_that_double_are_entered_once():
    old = Call(SET, ())
    node = (old, old)
    for _ in range(60):
        node = (node, node)
    root = [node]
    root = replaced(root, old, "new")
    node = root[0]
    for _ in range(60):
        assert node[0] is node[1]
        node = node[0]
    assert node == ("new", "new")


def test_every_call_is_found_once():
    inner, outer = Call(SET, ()), Call(SET, ())
    outer.args, outer.state = (inner, [inner]), Dict([("k", inner)])
    assert set(map(id, calls_of([outer, (outer, inner)]))) == {id(inner), id(outer)}
    assert len(list(calls_of([outer, (outer, inner)]))) == 2
