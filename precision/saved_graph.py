"""Saved activations under ``torch.compile``: a pass over the forward and the backward graph of a compiled region.

What a compiled region saves is decided by AOTAutograd's partitioner, long after Python ran. This pass runs right after
it: a value that leaves the forward graph for the backward one alone is quantized where it is computed, its codes and
scales leave instead, and the backward graph dequantizes them where a gradient first meets them
(:mod:`narrowgate.precision.saved_order`). Both are plain PyTorch operations, which Inductor fuses with what computes
the value and with what reads it. Which nodes belong to a model whose recipe says so, and the format, stand in their
annotations (:class:`narrowgate.precision.saved.SavedForward`); the rest of a graph, as a loss, is left alone.

The rules are those of eager mode (:mod:`narrowgate.precision.saved`), read off the graph:

- inputs of the graph, views and casts of them, and its outputs live anyway, as do other views of the same memory;
- what no input with a gradient leads to, and what comes from parameters alone, is no activation;
- further outputs of an operation are its statistics; a value that backward exponentiates keeps its precision.

Operands that forward has made for backward's products are kept as they are. Our layers mark them, and the graph is cut
so that forward makes them: else the partitioner may have backward make them again, out of a value that was itself
rounded. What backward runs again all the same, as a checkpointed region, it does from values as they were.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import must_recompute
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from . import saved_marks
from .fusion import STANDS
from .saved import ANNOTATION, DTYPES, decode_saved, encode_saved, within
from .saved_formats import pays, saved_bytes
from .saved_order import after, dependent, first_reader, gradient_to_await
from .spec import Spec

aten, prims = torch.ops.aten, torch.ops.prims

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
#: In the ``meta`` of a node that is an operand of a product in backward.
_OPERAND = "narrowgate_operand"
#: Change neither values nor what a tensor is; views are told by their schema.
_CASTS = (prims.convert_element_type.default, aten._unsafe_view.default, aten.clone.default)
#: On the way to an exponential an error stays what it is.
_SHIFTS = (aten.sub.Tensor, aten.add.Tensor)
#: Forward and backward.
_Pair = tuple[fx.GraphModule, fx.GraphModule]


def quantize_saved(joint: fx.GraphModule, cut: Callable[[int], _Pair], outputs: int, static: Iterable[int]) -> _Pair:
    """Partition ``joint`` and have the annotated part of what is saved saved in its format.

    Args:
        joint: forward and backward in one graph, as AOTAutograd traces it.
        cut: partitions it, given how many of its outputs are the forward's.
        outputs: how many these are.
        static: positions of inputs that are parameters or buffers.

    Returns:
        The forward and the backward graph module.
    """
    annotated = any(_spec_text(node) for node in joint.graph.nodes)
    _take_marks(joint.graph)
    if not annotated:
        told = within()
        if told is not None:
            warnings.warn(
                f"activations.save: a function is compiled by itself within a model that saves as {told}, and saves "
                "as if nothing were said: expected the model, or a module of it, to be compiled",
                stacklevel=2,
            )
        return cut(outputs)
    # Layers that read one tensor make its codes once. The partitioner finds that too, but not of a graph's outputs.
    joint.graph = fx_graph_cse(joint.graph)
    operands = [node for node in joint.graph.nodes if _OPERAND in node.meta]
    known = _Inputs(joint.graph, outputs, static)
    # As outputs of the forward they are made there; marked so, they are not made again out of what backward gets.
    for node in operands:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _insert_outputs(joint.graph, outputs, operands)
    forward, backward = cut(outputs + len(operands))
    _remove_outputs(forward.graph, outputs, len(operands))
    for node, spec in _choose(forward.graph, backward.graph, outputs, known).items():
        _replace(forward.graph, backward.graph, node, spec, outputs)
    forward.graph.eliminate_dead_code()
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


class _Inputs:
    """What the joint graph tells of its inputs, by their names."""

    def __init__(self, joint: fx.Graph, outputs: int, static: Iterable[int]) -> None:
        primals = [node for node in joint.find_nodes(op="placeholder") if "tangents" not in node.name]
        (output,) = joint.find_nodes(op="output")
        grads = pytree.arg_tree_leaves(*output.args)[outputs:]
        fixed = set(static)
        self.trained = {node.name for node, grad in zip(primals, grads, strict=False) if grad is not None}
        self.parameters = {node.name for position, node in enumerate(primals) if position in fixed}


def _take_marks(joint: fx.Graph) -> None:
    """Remove the marks of operands, and note in ``meta`` those that forward makes and no recompute repeats."""
    late = dependent(joint)
    for node in joint.find_nodes(op="call_function", target=torch.ops.narrowgate.kept_operand.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)
        joint.erase_node(node)
        # Layers that read one tensor may share its codes, and look at them each in a view of its own.
        while (looked_at := _viewed(source)) is not None and _elements(looked_at) == _elements(source):
            source = looked_at
        if source not in late and source.op == "call_function" and "recompute" not in node.meta:
            source.meta[_OPERAND] = True


def _insert_outputs(joint: fx.Graph, position: int, nodes: Sequence[fx.Node]) -> None:
    (output,) = joint.find_nodes(op="output")
    leaves = pytree.arg_tree_leaves(*output.args)
    output.args = ([*leaves[:position], *nodes, *leaves[position:]],)
    if "desc" in output.meta:
        told = pytree.arg_tree_leaves(output.meta["desc"])
        output.meta["desc"] = [*told[:position], *[None] * len(nodes), *told[position:]]


def _remove_outputs(forward: fx.Graph, position: int, count: int) -> None:
    (output,) = forward.find_nodes(op="output")
    leaves = _leaving(forward)
    output.args = ((*leaves[:position], *leaves[position + count :]),)
    if "desc" in output.meta:
        told = list(output.meta["desc"])
        output.meta["desc"] = [*told[:position], *told[position + count :]]


def _choose(forward: fx.Graph, backward: fx.Graph, outputs: int, known: _Inputs) -> dict[fx.Node, Spec]:
    """The saved nodes of the forward graph that are worth quantizing, each with its format."""
    leaving = _leaving(forward)
    saved = [node for node in leaving[outputs:] if isinstance(node, fx.Node)]
    read = {node.name: node for node in backward.find_nodes(op="placeholder")}
    flowing, late = _activations(forward, known), dependent(backward)
    found: dict[fx.Node, Spec] = {}
    for node in saved:
        text, value = _spec_text(node), node.meta.get("val")
        if text is None or node not in flowing or not isinstance(value, Tensor) or node.name not in read:
            continue
        spec = Spec.parse(text)
        wide_enough = value.dtype in DTYPES and pays(_sizes(value), value.dtype.itemsize, spec)
        left_alone = _is_statistic(node) or _is_exponent(read[node.name]) or _repeats(read[node.name], late)
        if wide_enough and not left_alone:
            found[node] = spec
    # Memory that lives anyway, by the node that owns it.
    alive = {_owner(node) for node in leaving if isinstance(node, fx.Node) and node not in found}
    alive |= {_owner(node) for node in leaving[:outputs] if isinstance(node, fx.Node)}
    cost: dict[fx.Node, int] = {}
    for node, spec in found.items():
        owner = _owner(node)
        cost[owner] = cost.get(owner, 0) + saved_bytes(_sizes(node.meta["val"]), spec)
    return {
        node: spec
        for node, spec in found.items()
        if (owner := _owner(node)) not in alive and owner.op != "placeholder" and cost[owner] < _bytes(owner)
    }


def _activations(forward: fx.Graph, known: _Inputs) -> set[fx.Node]:
    """Nodes that an input with a gradient leads to, and that are more than parameters and casts of inputs."""
    trained: set[fx.Node] = set()
    data: set[fx.Node] = set()
    inputs: set[fx.Node] = set()
    for node in forward.nodes:
        if node.op == "placeholder":
            inputs.add(node)
            if node.name in known.trained:
                trained.add(node)
            if node.name not in known.parameters:
                data.add(node)
            continue
        sources = node.all_input_nodes
        if any(source in trained for source in sources):
            trained.add(node)
        if any(source in data for source in sources):
            data.add(node)
        if sources and sources[0] in inputs and (node.target in _CASTS or _viewed(node) is not None):
            inputs.add(node)
    return (trained & data) - inputs


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node`` looks at; None where it has its own."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return _viewed(node.args[0])
    if node.target is aten._unsafe_view.default:
        return node.args[0]
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments or schema.is_mutable:
        return None
    return node.args[0] if schema.arguments[0].alias_info is not None else None


def _owner(node: fx.Node) -> fx.Node:
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node, or what it looks at, is a further output of an operation."""
    source = _owner(node)
    return source.target is operator.getitem and bool(source.args[1])


def _is_exponent(read: fx.Node) -> bool:
    """Whether backward exponentiates a saved value, shifted or not."""
    waiting, seen = [read], {read}
    while waiting:
        for user in waiting.pop().users:
            if user.target is aten.exp.default:
                return True
            if user not in seen and (user.target in (*_CASTS, *_SHIFTS) or _viewed(user) is not None):
                seen.add(user)
                waiting.append(user)
    return False


def _repeats(read: fx.Node, late: set[fx.Node]) -> bool:
    """Whether backward runs a part of the forward again that makes codes of a saved value, or that is checkpointed."""
    waiting, seen = [read], {read}
    while waiting:
        for user in waiting.pop().users:
            if user in late:
                continue
            if must_recompute(user) or any(value.dtype in _CODES for value in _values(user)):
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _values(node: fx.Node) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _replace(forward: fx.Graph, backward: fx.Graph, node: fx.Node, spec: Spec, outputs: int) -> None:
    """Have ``node`` leave the forward graph as codes and scales, and backward make its values of them, in time."""
    value = node.meta["val"]
    parts = _inline(forward, node.next, lambda x: encode_saved(x, spec, kernels=False), [node])
    (output,) = forward.find_nodes(op="output")
    leaving = _leaving(forward)
    for part in parts:
        if "saved_tensor_with_no_vc_check" in node.meta:  # the runtime counts these, and wants them side by side
            part.meta["saved_tensor_with_no_vc_check"] = node.meta["saved_tensor_with_no_vc_check"]
    kept = leaving[:outputs]
    for entry in leaving[outputs:]:
        kept += parts if entry is node else [entry]
    output.args = (tuple(kept),)

    (read,) = (entry for entry in backward.find_nodes(op="placeholder") if entry.name == node.name)
    arriving: list[fx.Node] = []
    with backward.inserting_before(read):
        for part in parts:
            entry = backward.placeholder(f"{node.name}_{part.name}")
            entry.meta = {"val": part.meta["val"]}
            arriving.append(entry)
    gradient = gradient_to_await(backward, read, dependent(backward))

    def decode(*kept: Tensor) -> list[Tensor]:
        values = decode_saved(kept[: len(parts)], spec, value.dtype)
        if gradient is not None:
            values = after(values, kept[-1])
        if values.stride() != value.stride():
            values = prims.inductor_force_stride_order.default(values, value.stride())
        return [values]

    awaited = [] if gradient is None else [gradient]
    (values,) = _inline(backward, first_reader(backward, read), decode, [*arriving, *awaited])
    read.replace_all_uses_with(values)
    backward.erase_node(read)
    # What backward makes again out of saved values alone may stand before the gradient, and now waits for it too.
    stable_topological_sort(backward)


def _inline(graph: fx.Graph, before: fx.Node, function: Any, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Trace ``function`` over the values of ``inputs`` into ``graph``, ahead of ``before``; return its results."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [node.meta["val"] for node in inputs]
    with torch.no_grad(), fakes[0].fake_mode, _compiling():
        traced = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    names = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in traced.graph.nodes:
        if node.op == "output":
            return [names[result] for result in pytree.arg_tree_leaves(*node.args)]
        if node.op == "placeholder":
            continue
        with graph.inserting_before(before):
            copied = names[node] = graph.node_copy(node, names.__getitem__)
        copied.meta = {"val": node.meta.get("val"), STANDS: True}
    raise AssertionError("a traced graph has an output")


@contextmanager
def _compiling() -> Iterator[None]:
    """What is traced here is compiled: as ``torch.compiler.is_compiling()`` says while Dynamo traces."""
    before = torch.compiler._is_compiling_flag  # type: ignore[attr-defined]
    torch.compiler._is_compiling_flag = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before  # type: ignore[attr-defined]


def _leaving(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _spec_text(node: fx.Node) -> str | None:
    return (node.meta.get("custom") or {}).get(ANNOTATION)


def _sizes(value: Tensor) -> list[int]:
    """Sizes of a traced tensor; of one that is not known before it runs, those of the batch it was traced with."""
    return [size if isinstance(size, int) else int(size.node.hint or 1) for size in value.shape]


def _elements(node: fx.Node) -> Any:
    """How many elements a traced tensor has; None for several tensors."""
    value = node.meta.get("val")
    return prod(_sizes(value)) if isinstance(value, Tensor) else None


def _bytes(owner: fx.Node) -> int:
    """Bytes that a traced tensor takes; 0 for several, each of which has memory of its own."""
    value = owner.meta["val"]
    return prod(_sizes(value)) * value.dtype.itemsize if isinstance(value, Tensor) else 0


class SavedPartitioner(CustomPartitionerFn):
    """:func:`quantize_saved` as Inductor takes it, around a partitioner that was set before."""

    def __init__(self, before: CustomPartitionerFn | None = None) -> None:
        self.before = before

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Partition and rewrite."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        partition = self.before or min_cut_rematerialization_partition

        def cut(outputs: int) -> _Pair:
            return partition(gm, joint_inputs, **{**kwargs, "num_fwd_outputs": outputs})

        static = kwargs.get("static_lifetime_input_indices") or ()
        return quantize_saved(gm, cut, kwargs["num_fwd_outputs"], static)

    def uuid(self) -> Any:
        """Key of Inductor's caches: what this does is decided by its sources, and by annotations.

        Those come with an operator in the graph, see :mod:`narrowgate.precision.saved_marks`.
        """
        from . import grouping, quantization, saved, saved_formats, saved_order, scaling

        files = tuple(
            str(module.__file__) for module in (saved, saved_formats, saved_order, quantization, grouping, scaling)
        )
        own = get_hash_for_files((__file__, *files))
        if self.before is None:
            return own
        earlier = self.before.uuid()
        return None if earlier is None else (own, earlier)


@cache
def install() -> None:
    """Have Inductor partition every graph that it compiles from now on so."""
    from torch._inductor import config

    saved_marks.installed = True
    config.custom_partitioner_fn = SavedPartitioner(config.custom_partitioner_fn)
