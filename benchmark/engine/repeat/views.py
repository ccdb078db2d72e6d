"""Find recorded operations that share memory: views, and the results that they lie in."""

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from benchmark.internals import OpOverload

aten = torch.ops.aten


def writes(node: Node) -> bool:
    """Return whether an operation writes into its first argument; taking one of several results does not."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def base_of(node: Any) -> Any:
    """Return the node whose memory this one's result lies in: its own, or that of what it is a view of."""
    while isinstance(node, Node) and node.op == "call_function" and node.args:
        source = node.args[0] if node.target is getitem else node
        if not isinstance(source, Node) or not isinstance(source.target, OpOverload):
            break
        returned = source.target._schema.returns
        if not returned or returned[0].alias_info is None:
            break
        node = source.args[0]
    return node


def view_at_once(graph: Graph, written: set[Any]) -> None:
    """Let every view be one of the result that it lies in, in a single operation, however many led to it."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        below = _below(node)
        made, under = node.meta.get("layout"), below.meta.get("layout")
        if below is node or made is None or under is None or below in written or made.dtype != under.dtype:
            continue
        (memory, offset), (other, start) = node.meta["place"], below.meta["place"]
        if memory != other or (offset != start and below.op != "call_function"):
            continue  # where an input begins in its memory may change
        key = (below, made.shape, made.stride, offset)
        if made == under and offset == start:
            known[key] = below
        elif key not in known:
            at = (offset,) if below.op == "call_function" else ()
            with graph.inserting_before(node):
                known[key] = graph.call_function(aten.as_strided.default, (below, tuple(made.shape), made.stride, *at))
            known[key].meta |= node.meta
        node.replace_all_uses_with(known[key])


def _below(node: Node) -> Node:
    """Return the node whose result a view lies in, however deep."""
    while True:
        base: Node = base_of(node)
        if base.target is not aten._unsafe_view.default:
            return base
        (node,) = base.all_input_nodes
