"""What each kind of equation does to the axes of its operands.

A family is a function (walk, equation, values) -> the axes of each result. It notes what splitting
an axis would cost (`walk.note`), and which axes are the same dimension (`walk.same`). Costs are in
bytes of the first result, or for what breaks of the first operand, unless given.

Shapes are those of the equation: an axis of size 1 has no factors, and so is nobody's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Literal

from core.rules.factors import Axis, Factor, fresh, regroup, size

if TYPE_CHECKING:
    from core.rules.walk import Value, Walk

Outs = Iterable[Iterable[Axis]]
Ins = Sequence["Value"]
Cuts = dict[tuple[Any, int], list[int]]


def elementwise(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    """All operands have the shape of the results, but for scalars and axes of size 1."""
    shape = eqn.outvars[0].aval.shape
    axes = list(fresh(shape))
    for atom, value in zip(eqn.invars, ins, strict=True):
        if atom.aval.shape and not _fits(atom.aval.shape, shape):
            return walk.broken(eqn, ins)
        for d, axis in enumerate(value.axes):
            walk.same(axes[d], axis)
    return [axes for _ in eqn.outvars]


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    pairs = zip(shape, whole, strict=False)
    return len(shape) == len(whole) and all(n in (1, m) for n, m in pairs)


def new(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    """Of nobody's dimensions, such as random bits."""
    return [fresh(v.aval.shape) for v in eqn.outvars]


def dot_general(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = ins
    for i, j in [*zip(*contracted, strict=True), *zip(*batch, strict=True)]:
        walk.same(left.axes[i], right.axes[j])
    param = left.param if right.param is None else right.param
    for i in contracted[0]:
        walk.note("contract", left.axes[i], param)
    out = [left.axes[i] for i in batch[0]]
    for value, summed, shared in zip(ins, contracted, batch, strict=True):
        free = [axis for i, axis in enumerate(value.axes) if i not in (*summed, *shared)]
        out += free
        if value.param is not None:
            for kind, axes in (("column", free), ("batch", [value.axes[i] for i in shared])):
                for axis in axes:
                    walk.note(kind, axis, value.param)
    for i in batch[0] if param is None else ():
        walk.note("attend", left.axes[i])
    return [out]


def convolution(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    """A window is never split: its gradient was wrong, split together with a batch (jax 0.10.2)."""
    left, right = ins
    lhs, rhs, out = eqn.params["dimension_numbers"]
    axes = list(fresh(eqn.outvars[0].aval.shape))
    features, kernels = left.axes[lhs[1]], right.axes[rhs[0]]
    walk.frozen += [right.axes[i] for i in rhs[2:]]
    for i in lhs[2:]:
        walk.note("break", left.axes[i])
    if eqn.params["batch_group_count"] > 1:
        return walk.broken(eqn, ins)
    if (groups := eqn.params["feature_group_count"]) > 1:
        _grouped(walk, groups, features, kernels, right.axes[rhs[1]])
    else:
        walk.same(features, right.axes[rhs[1]])
        walk.note("contract", features, left.param if right.param is None else right.param)
    walk.note("column", kernels, right.param)
    axes[out[0]], axes[out[1]] = left.axes[lhs[0]], kernels
    return [axes]


def _grouped(walk: "Walk", groups: int, features: Axis, kernels: Axis, inner: Axis) -> None:
    """Groups go side by side: what goes in and what comes out of a group is never split."""
    walk.grouped += [shared := fresh([groups])[0]]
    walk.frozen += [inner]
    for axis in (features, kernels):
        parts = regroup(axis, (groups, size(axis) // groups))
        if parts is None:
            walk.note("break", axis)
        else:
            walk.same(shared, parts[0])
            walk.frozen += [parts[1]]


def broadcast_in_dim(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    axes = list(fresh(eqn.params["shape"]))
    for axis, d in zip(ins[0].axes, eqn.params["broadcast_dimensions"], strict=True):
        axes[d] = axis or axes[d]
    return [axes]


def reshape(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    """Splits and merges axes, where their sizes line up; in groups of axes of equal products."""
    old, shape = ins[0].axes, eqn.outvars[0].aval.shape
    out: list[Axis] = []
    for olds, news in _groups(eqn.invars[0].aval.shape, shape):
        out += _regrouped(walk, [f for axis in old[olds] for f in axis], shape[news])
    if ins[0].param is None:
        for axis in out:
            walk.note("merge", axis)
    return [out]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterable[tuple[slice, slice]]:
    """Runs of axes, old and new, with equal products, as short as can be."""
    i = j = 0
    while i < len(old) or j < len(new):
        a, b, m, n = i, j, 1, 1
        while True:
            if a < len(old) and (m < n or (m == n and b > j) or b == len(new)):
                m, a = m * old[a], a + 1
            elif b < len(new):
                n, b = n * new[b], b + 1
            if m == n and (a > i or b > j):
                break
        yield slice(i, a), slice(j, b)
        i, j = a, b


def _regrouped(walk: "Walk", axis: Axis, sizes: Sequence[int]) -> Sequence[Axis]:
    axes = regroup(axis, sizes)
    if axes is None:
        walk.note("break", axis)
        return fresh(sizes)
    return axes


def transpose(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    return [[ins[0].axes[d] for d in eqn.params["permutation"]]]


def squeeze(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    gone = {d % len(ins[0].axes) for d in eqn.params["dimensions"]}
    return [[axis for d, axis in enumerate(ins[0].axes) if d not in gone]]


def reduce(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    gone = {d % len(ins[0].axes) for d in eqn.params["axes"]}
    for d in gone:
        walk.note("reduce", ins[0].axes[d])
    left = [axis for d, axis in enumerate(ins[0].axes) if d not in gone]
    return [left for _ in eqn.outvars]


def along(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    """Cumulative sums, sorting and the like: what is needed whole is the axis worked along."""
    params, axes = eqn.params, ins[0].axes
    given = params.get("axis", params.get("dimension", params.get("dimensions", len(axes) - 1)))
    worked = {d % len(axes) for d in (given if isinstance(given, tuple | list) else (given,))}
    for value in ins:
        for d, axis in enumerate(value.axes):
            walk.same(axes[d], axis)
            if d in worked:
                walk.note("break", axis)
    old = eqn.invars[0].aval.shape
    return [
        [axes[d] if n == old[d] else fresh([n])[0] for d, n in enumerate(v.aval.shape)]
        for v in eqn.outvars
    ]


def partitions(jaxpr: Any) -> Cuts:
    """The sizes of the parts, by (variable, axis), where slices cut an axis whole into several."""
    seen: dict[tuple[Any, int], set[tuple[int, int]]] = defaultdict(set)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "slice" and not isinstance(eqn.invars[0], Literal):
            ends = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)
            for d, span in enumerate(ends):
                seen[eqn.invars[0], d].add(span)
    out = {}
    for (variable, d), spans in seen.items():
        n = variable.aval.shape[d]
        cut = sorted(spans - {(0, n)})
        if len(cut) > 1 and [0, *(end for _, end in cut)] == [*(start for start, _ in cut), n]:
            out[variable, d] = [end - start for start, end in cut]
    return out


def window(walk: "Walk", eqn: Any, ins: Ins, cuts: Cuts | None = None) -> Outs:
    """Slices and padding: an axis that is taken whole is kept, and so are parts of equal size."""
    old, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    strides = eqn.params.get("strides") or (1,) * len(old)
    # One of a parameter's layers, in a loop that is unrolled.
    ones = [d for d, n in enumerate(old) if shape[d] == 1 < n]
    layer = ones[0] if ins[0].param is not None and len(ones) == 1 else None
    out: list[Axis] = []
    for d, axis in enumerate(ins[0].axes):
        parts = (cuts or {}).get((eqn.invars[0], d), [1])
        if shape[d] == old[d]:
            out.append(axis)
        elif min(parts) > 1:
            out.append(_part(walk, axis, parts, shape[d]))
        elif strides[d] > 1 and old[d] == shape[d] * strides[d]:  # one of interleaved parts
            out.append(_regrouped(walk, axis, [shape[d], strides[d]])[0])
        else:
            out += fresh([shape[d]])
            walk.pieces.append((out[-1], axis))
            if d == layer:
                walk.frozen.append(axis)
            else:
                walk.note("break", axis)
    return [out]


def split(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    d, sizes = eqn.params["axis"], [int(n) for n in eqn.params["sizes"]]
    before, axis, after = ins[0].axes[:d], ins[0].axes[d], ins[0].axes[d + 1 :]
    return [(*before, _part(walk, axis, sizes, n), *after) for n in sizes]


def _part(walk: "Walk", axis: Axis, sizes: Sequence[int], n: int) -> Axis:
    """The axis of a part of a fused q|k|v or gate|up, which is cut into parts of these sizes."""
    if len(set(sizes)) > 1:
        walk.note("break", axis)
        return fresh([n])[0]
    which, rest = _regrouped(walk, axis, [len(sizes), n])
    walk.fused.append(which)
    return rest


def concatenate(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    d, first = eqn.params["dimension"], ins[0].axes
    equal = len({v.aval.shape[d] for v in eqn.invars}) == 1
    for value in ins:
        for i, axis in enumerate(value.axes):
            if i != d or equal:
                walk.same(first[i], axis)
            else:
                walk.note("break", axis)
    number = [Factor(len(ins))] if len(ins) > 1 else []
    joined = (*number, *first[d]) if equal else fresh([eqn.outvars[0].aval.shape[d]])[0]
    return [(*first[:d], joined, *first[d + 1 :])]


def stack(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    for value in ins[1:]:
        for one, other in zip(ins[0].axes, value.axes, strict=True):
            walk.same(one, other)
    d = eqn.params["axis"] % (len(ins[0].axes) + 1)
    return [(*ins[0].axes[:d], *fresh([len(ins)]), *ins[0].axes[d:])]


def unstack(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    d = eqn.params["axis"] % len(ins[0].axes)
    if ins[0].param is not None:
        walk.frozen.append(ins[0].axes[d])
    else:
        walk.note("break", ins[0].axes[d])
    return [ins[0].axes[:d] + ins[0].axes[d + 1 :] for _ in eqn.outvars]


def tile(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    pairs = zip(eqn.params["reps"], ins[0].axes, strict=True)
    return [[(*fresh([times])[0], *axis) for times, axis in pairs]]


def dynamic_update_slice(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    old, part = (v.aval.shape for v in eqn.invars[:2])
    for d, axis in enumerate(ins[0].axes):
        if old[d] == part[d]:
            walk.same(axis, ins[1].axes[d])
        else:
            walk.note("break", axis)
    return [ins[0].axes]


def gather(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    n = eqn.params["dimension_numbers"]
    batch = (n.operand_batching_dims, n.start_indices_batching_dims)
    part = eqn.outvars[0].aval.shape
    return [_indexed(walk, eqn, ins, part, n.collapsed_slice_dims, batch, n.offset_dims)]


def scatter(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
    n = eqn.params["dimension_numbers"]
    batch = (n.operand_batching_dims, n.scatter_indices_batching_dims)
    part = eqn.invars[2].aval.shape
    axes = _indexed(walk, eqn, ins, part, n.inserted_window_dims, batch, n.update_window_dims)
    for one, other in zip(axes, ins[2].axes, strict=True):
        walk.same(one, other)
    return [ins[0].axes]


def _indexed(
    walk: "Walk",
    eqn: Any,
    ins: Ins,
    part: Sequence[int],
    looked_up: Sequence[int],
    batch: tuple[Sequence[int], Sequence[int]],
    kept: Sequence[int],
) -> Sequence[Axis]:
    """The axes of what is read from an array, or written into it, at indices: of this shape."""
    whole, (value, index) = eqn.invars[0].aval.shape, ins[:2]
    out = list(fresh(part))
    rest = [d for d in range(len(whole)) if d not in (*looked_up, *batch[0])]
    for d, o in zip(rest, kept, strict=True):
        if whole[d] == part[o]:
            out[o] = value.axes[d]
        else:
            walk.note("break", value.axes[d])
    for o, axis in zip([o for o in range(len(part)) if o not in kept], index.axes, strict=False):
        out[o] = axis
    for d, i in zip(*batch, strict=True):
        walk.same(value.axes[d], index.axes[i])
    for d in looked_up:
        walk.note("lookup", value.axes[d], value.param)
    return out


def opaque(signature: str) -> "Family":
    """An operation that is known by its operands' and its first result's axes, as einsum has them;
    what else goes in is needed whole."""
    inputs, output = signature.split("->")
    letters = inputs.split(",")

    def family(walk: "Walk", eqn: Any, ins: Ins) -> Outs:
        known: dict[str, Axis] = {}
        for names, value in zip(letters, ins, strict=False):
            for name, axis in zip(names, value.axes, strict=True):
                walk.same(known.setdefault(name, axis), axis)
        for name, axis in known.items():
            walk.note("attend" if name in output else "contract", axis)
        for value in ins[len(letters) :]:
            for axis in value.axes:
                walk.note("break", axis)
        others = [fresh(v.aval.shape) for v in eqn.outvars[1:]]
        return [[known[name] for name in output], *others]

    return family


def view_of(eqn: Any, ins: Ins) -> int | None:
    """The parameter that the results of an equation are a view of."""
    if eqn.primitive.name not in VIEWS:
        return None
    for atom, value in zip(eqn.invars, ins, strict=True):
        # What a bias is added to is no view of the bias, but an activation.
        if value.param is not None and _size(eqn.outvars[0]) <= _size(atom):
            return value.param
    return None


def bytes_of(atom: Any) -> int:
    return int(_size(atom) * getattr(atom.aval.dtype, "itemsize", 4))


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


Family = Callable[["Walk", Any, Ins], Outs]

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor from_edtype ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to
max min mul mulhi name ne neg nextafter not one_minus_square or polygamma population_count pow
real reciprocal reduce_precision regularized_incomplete_beta rem round rsqrt select_n
sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh threefry2x32 to_edtype xor zeta
"""
_NEW = """
empty empty2 iota random_bits random_clone random_fold_in random_seed random_split random_unwrap
random_wrap rng_bit_generator rng_uniform
"""
_REDUCE = (
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)
_ALONG = "cumlogsumexp cummax cummin cumprod cumsum rev sort top_k"
_SCATTER = "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub"

# Results that are what a parameter is, in another form: what is split of one is of the other.
VIEWS = set("convert_element_type copy reduce_precision stop_gradient sharding_constraint".split())
VIEWS |= set("neg add sub mul div select_n slice dynamic_slice rev transpose reshape".split())
VIEWS |= set("squeeze broadcast_in_dim split unstack".split())

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(_NEW.split(), new),
    **dict.fromkeys(_REDUCE.split(), reduce),
    **dict.fromkeys(_ALONG.split(), along),
    **dict.fromkeys(_SCATTER.split(), scatter),
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "conv_general_dilated": convolution,
    "dot_general": dot_general,
    "dynamic_slice": window,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "pad": window,
    "reshape": reshape,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "transpose": transpose,
    "unstack": unstack,
    # Fused attention: batch, query time, heads, features; key time.
    "dot_product_attention_fwd_wrapper": opaque("bthk,bshk,bshk->bthk"),
}
