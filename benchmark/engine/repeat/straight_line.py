"""A function of tensors recorded, made short and turned into Python without a loop or a branch."""

import sys
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from benchmark.engine.repeat.operations import OperationRecorder
from benchmark.engine.repeat.views import base_of, view_at_once, writes
from benchmark.internals import tree_flatten, tree_leaves, tree_map, without_autocast

aten = torch.ops.aten
#: Operations that give their first argument another name, once nothing is differentiated.
NAMES = {aten.detach.default, aten.alias.default}
#: Operations that give it another shape, or the same.
SHAPES = {aten.expand.default, aten.view.default, aten._unsafe_view.default}
#: Operations that take of their first argument its shape alone.
LIKE = {aten.new_zeros.default, aten.new_ones.default, aten.zeros_like.default, aten.ones_like.default}
LIKE |= {aten.new_full.default, aten.full_like.default}
#: Numbers in a constant that is kept, at most.
KEPT = 2**16


def straight_line(
    function: Callable[..., Any], inputs: Sequence[Tensor], room: int = sys.maxsize
) -> Callable[..., Any]:
    """Record a function of tensors: return one that repeats its operations, without the superfluous half of them.

    Every bit is the same. What goes are further names, views of the same shape, products with 1, constants made anew in
    each call, and operations that were done already; a view of a view becomes one of what lies below. Python runs now
    and never again: what it decides (an ``if`` on an attribute, a loop's length) stays decided.

    Args:
        function: gives a tree of tensors.
        inputs: its arguments; without gradients.
        room: bytes that all it makes may take together; it stays there until the last operation.

    Raises:
        ValueError: an operation draws random numbers or writes into an input, Python reads a number, or there is no
            room.
    """
    # On a GPU the backward operations would run in a thread of autograd's, unseen.
    with OperationRecorder(inputs, room) as recorder, torch.autograd.set_multithreading_enabled(False):
        made = function(*inputs)
    graph = recorder.graph
    graph.output(tree_map(recorder.written, made))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    written = {base_of(node.args[0]) for node in calls if writes(node)}
    if any(node.op != "call_function" for node in written):
        raise ValueError("an operation writes into a tensor that was there before")
    known: dict[Any, Node] = {}
    for node in calls:
        if writes(node) or base_of(node) in written:
            continue
        other = _superfluous(node) or known.setdefault(_spelled(node), node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)
    view_at_once(graph, written)
    graph.eliminate_dead_code()
    with without_autocast():  # what is recorded is what autocast has made of it
        constants = _constants(graph, recorder.outside, written)
    _own_results(graph, constants)
    graph.eliminate_dead_code()
    return _function(graph, constants, recorder.outside)


def _superfluous(node: Node) -> Node | None:
    """Return the node that gives the same numbers in the same shape as this one, if its operation does nothing."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if node.target in NAMES:
        return first
    if first.meta.get("layout") != node.meta.get("layout"):
        return None
    by_one = node.target in (aten.mul.Scalar, aten.mul.Tensor) and node.args[1] == 1
    return first if node.target in SHAPES or by_one else None


def _spelled(node: Node) -> tuple[Any, ...]:
    """Return what is equal for equal operations on the same tensors; a number's type belongs to it."""
    leaves, of = tree_flatten((node.args, node.kwargs))
    return node.target, of, tuple((type(leaf), leaf) for leaf in leaves)


def _constants(graph: Graph, outside: dict[Node, Tensor], written: set[Any]) -> dict[Node, Any]:
    """Compute what depends on no input and on no tensor of the method, whose numbers may change between calls."""
    found: dict[Node, Any] = {}
    for node in graph.nodes:
        made = node.meta.get("layout")
        if node.op != "call_function" or made is None or made.shape.numel() > KEPT or base_of(node) in written:
            continue
        inputs = [part for part in tree_leaves((node.args, node.kwargs)) if isinstance(part, Node)]
        values = {part: found[part] for part in inputs if part in found}
        if node.target in LIKE:
            like = inputs[0].meta["layout"]
            values[inputs[0]] = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
        elif node.target is aten.lift_fresh.default:  # of a number that the method's code makes a tensor of
            values[inputs[0]] = outside[inputs[0]]
        if all(part in values for part in inputs):
            found[node] = _computed(node, values)
    return found


def _computed(node: Node, values: dict[Node, Any]) -> Any:
    """Carry out an operation on these values."""
    args, kwargs = tree_map(lambda part: values[part] if isinstance(part, Node) else part, (node.args, node.kwargs))
    return cast(Callable[..., Any], node.target)(*args, **kwargs)


def _own_results(graph: Graph, constants: dict[Node, Any]) -> None:
    """Let every result have memory of its own: who receives it may write into it."""
    output = graph.output_node()
    taken = {node for node in graph.nodes if node.op != "call_function"} | set(constants)

    def owned(result: Any) -> Any:
        if not isinstance(result, Node):
            return result
        base = base_of(result)
        if base in taken or result in constants:
            with graph.inserting_before(output):
                return graph.call_function(aten.clone.default, (result,))
        taken.add(base)
        return result

    output.args = (tree_map(owned, output.args[0]),)


def _function(graph: Graph, constants: dict[Node, Any], outside: dict[Node, Tensor]) -> Callable[..., Any]:
    """Return the graph as a Python function of a line an operation, which lets go of a tensor after its last use.

    torch's own code for a graph looks up every operation by its dotted name, in each call.
    """
    held: dict[str, Any] = {}

    def spelled(value: Any) -> str:
        if isinstance(value, Node):
            return names[value]
        if isinstance(value, list | tuple):
            return f"({''.join(f'{spelled(part)}, ' for part in value)})"
        if isinstance(value, dict):
            return f"{{{''.join(f'{key!r}: {spelled(part)}, ' for key, part in value.items())}}}"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
            return repr(value)
        name = f"held{len(held)}"
        held[name] = value
        return name

    names = {node: spelled(value) for node, value in (constants | outside).items()}
    last: dict[Node, Node] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            last.setdefault(used, node)
    lines = []
    for number, node in enumerate(node for node in graph.nodes if node not in constants):
        names.setdefault(node, f"v{number}")
        if node.op == "call_function":
            given = [spelled(part) for part in node.args]
            given += [f"{key}={spelled(part)}" for key, part in node.kwargs.items()]
            if node.target is aten.as_strided.default:  # twice as fast as the operation's own name
                lines.append(f"{names[node]} = {given[0]}.as_strided({', '.join(given[1:])})")
            else:
                lines.append(f"{names[node]} = {spelled(getattr(node.target, '_op', node.target))}({', '.join(given)})")
        elif node.op == "output":
            lines.append(f"return {spelled(node.args[0])}")
        done = [names[used] for used in node.all_input_nodes if last[used] is node and names[used][0] == "v"]
        if done and node.op == "call_function":
            lines.append(f"del {', '.join(done)}")
    inputs = ", ".join(names[node] for node in graph.nodes if node.op == "placeholder")
    body = "".join(f"    {line}\n" for line in lines)
    exec(f"def recorded({inputs}):\n{body}", held)
    return cast(Callable[..., Any], held["recorded"])
