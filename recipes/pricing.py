"""What a layer's step is predicted to cost in BF16 and in the formats that a recipe gives it.

For M rows of a layer y [M,N] = x [M,K] Wᵀ on a device with measured rates (:mod:`narrowgate.recipes.rates`), the time
of fprop, dgrad and wgrad together is

- the three products, each the larger of its operations over the predicted rate and its bytes over copy bandwidth;
- the passes over memory that our own layers make around them (:mod:`narrowgate.precision.linear` under
  ``torch.compile``): every operand quantized along its path's contraction, from BF16 activations and gradients and from
  the FP32 master weight, once where two paths share codes, and copied transposed as codes where the matrix units want
  the other axis last; at the measured bandwidth of a cast, plain conversions at that of a copy;
- for BF16, what autocast adds: the weight converted to BF16 in forward, its gradient converted back.

A cast reads its operand once more than it has to wherever a scale needs an amax over more than :data:`IN_REGISTERS`
elements (``tensor``, ``row``, 128x128), also for ``delayed``, whose amax still has to show that the tensor is finite.
Not counted: launches, scales themselves, the sample that a percentile clip looks at, random bits, bias. An emulated
path multiplies in BF16 and converts its codes back, so it never pays. All of this is a prediction, made to tell layers
that pay from layers that do not; what a step gains is measured by the gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..precision.capability import has_cast_kernel, same_codes
from ..precision.config import GemmConfig, LinearConfig
from ..precision.spec import Spec
from .rates import BF16, Rates, variant_of

#: Elements of one scale that a fused cast keeps in registers between the amax and the rounding.
IN_REGISTERS = 128 * 128
#: Bytes an element: activations and gradients, master weights.
_ACTIVATION, _MASTER = 2, 4
#: FP8 matrix units take multiples of this many elements.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PathPrice:
    """One product of a layer, in microseconds."""

    #: In BF16: the product, and its share of what autocast converts.
    bf16_us: float
    #: As the recipe says: the product, and the passes over memory for its operands.
    gemm_us: float
    cast_us: float

    @property
    def us(self) -> float:
        """The whole path as the recipe says."""
        return self.gemm_us + self.cast_us


@dataclass(frozen=True)
class LayerPrice:
    """A layer's predicted step time, all three paths, in BF16 and as its recipe says."""

    #: M: rows that the layer multiplies in one step.
    rows: int
    paths: Mapping[str, PathPrice]
    #: Whether all three shapes lie within the measured ones.
    within: bool

    @property
    def bf16_us(self) -> float:
        """Microseconds in BF16."""
        return sum(path.bf16_us for path in self.paths.values())

    @property
    def us(self) -> float:
        """Microseconds as the recipe says."""
        return sum(path.us for path in self.paths.values())

    @property
    def cast_us(self) -> float:
        """Microseconds of :attr:`us` that are no product."""
        return sum(path.cast_us for path in self.paths.values())

    @property
    def gain_us(self) -> float:
        """Microseconds saved over BF16; negative where low precision loses time."""
        return self.bf16_us - self.us

    @property
    def ratio(self) -> float:
        """Speedup over BF16: above 1 where low precision pays."""
        return self.bf16_us / self.us

    @property
    def pays(self) -> bool:
        """Whether low precision is predicted to be faster."""
        return self.us < self.bf16_us

    def to_dict(self) -> dict[str, Any]:
        """Return the price as JSON-ready data, times in microseconds."""
        return {
            "rows": self.rows,
            "bf16_us": self.bf16_us,
            "us": self.us,
            "cast_us": self.cast_us,
            "gain_us": self.gain_us,
            "ratio": self.ratio,
            "within_measured_shapes": self.within,
            "paths": {
                name: {"bf16_us": path.bf16_us, "gemm_us": path.gemm_us, "cast_us": path.cast_us}
                for name, path in self.paths.items()
            },
        }


@dataclass(frozen=True)
class Unpriced:
    """Why a layer has no price."""

    reason: str


def price_layer(
    config: LinearConfig,
    rows: int,
    in_features: int,
    out_features: int,
    rates: Rates,
    native: Mapping[str, bool] | None = None,
) -> LayerPrice | Unpriced:
    """Predict what one layer costs in a step, forward and backward.

    Args:
        config: its three GEMMs.
        rows: M, all rows it multiplies in one step, positive.
        in_features: K.
        out_features: N.
        rates: what the device was measured to do.
        native: whether each path runs on the device's matrix units; all of them where None.
    """
    runs = tuple((native or {}).get(path, True) for path, _ in config.gemms())
    return _price(config, rows, in_features, out_features, rates, runs)


def cast_bytes(spec: Spec, elements: int, source: int) -> float:
    """Return the bytes read and written to bring ``elements`` of ``source`` bytes each into ``spec``.

    Zero where BF16 stays BF16.
    """
    if spec.high_precision:
        width = spec.fmt.element.bits // 8
        return 0.0 if source == width and not spec.sr else float(elements * (source + width))
    total = 0.0
    if spec.hadamard is not None:  # a pass of its own, into FP32
        total, source = float(source + 4), 4
    whole = spec.block is None or math.prod(spec.block) > IN_REGISTERS or spec.fmt.tensor_scale
    amax_first = whole and spec.delayed is None
    if amax_first:
        total += source
    # The cast kernels find the RMS in the pass that finds the amax.
    if spec.clip_rms is not None and not (amax_first and has_cast_kernel(spec)):
        total += source
    return elements * (total + source + _code_bytes(spec))


def shares_codes(spec: Spec, wanted: Spec) -> bool:
    """Whether a tensor quantized as ``spec`` along one axis serves ``wanted`` along the other without a second cast.

    The same answer as :func:`narrowgate.precision.operands.shared`, asked before there is a tensor.
    """
    return same_codes(spec, wanted) or (spec == wanted and spec.high_precision and not spec.sr)


@lru_cache(maxsize=8192)
def _price(
    config: LinearConfig, m: int, k: int, n: int, rates: Rates, native: tuple[bool, ...]
) -> LayerPrice | Unpriced:
    # By path: rows, contraction and columns of the product, as [rows, contraction] · [columns, contraction]ᵀ.
    shapes = {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}
    # By path: the operands' bytes an element before any cast, and what they may have been quantized as already.
    sources = {"fprop": (_ACTIVATION, _MASTER), "dgrad": (_ACTIVATION, _MASTER), "wgrad": (_ACTIVATION, _ACTIVATION)}
    before = {
        "fprop": (None, None),
        "dgrad": (None, config.fprop.second),
        "wgrad": (config.dgrad.first, config.fprop.first),
    }
    #: Operands that stand transposed: quantized along their first axis in memory.
    transposed = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
    weight = n * k
    # Autocast converts the weight in forward (4 + 2 bytes) and its gradient in backward (2 + 4); our layers write the
    # gradient in FP32 themselves, 2 bytes more than the BF16 output that rates were measured with.
    converted = {"fprop": 6 * weight, "dgrad": 0, "wgrad": 6 * weight}
    paths: dict[str, PathPrice] = {}
    for (path, gemm), runs in zip(config.gemms(), native, strict=True):
        rows, contraction, columns = shapes[path]
        sizes = (rows * contraction, columns * contraction)
        us = _gemm_us(gemm, rows, contraction, columns, rates, native=runs)
        if us is None:
            return Unpriced(f"no measured rate of {variant_of(gemm)} in {rates.source}")
        cast = plain = 0.0
        for i, spec in enumerate((gemm.first, gemm.second)):
            earlier = before[path][i]
            if runs and has_cast_kernel(spec):
                # One kernel writes both of a tensor's operands, each contiguous along its own contraction, and reads
                # the tensor for both as often as for one.
                second = earlier is not None and has_cast_kernel(earlier)
                cast += sizes[i] * _code_bytes(spec) if second else cast_bytes(spec, sizes[i], sources[path][i])
                if (rows if i == 0 else columns) % _ALIGNMENT or contraction % _ALIGNMENT:
                    cast += sizes[i] * 2 * _code_bytes(spec)
                continue
            if earlier is None or not shares_codes(earlier, spec):
                bytes_moved = cast_bytes(spec, sizes[i], sources[path][i])
                if spec.high_precision:
                    plain += bytes_moved
                else:
                    cast += bytes_moved
            if not spec.high_precision:
                lines = rows if i == 0 else columns
                copied = transposed[path][i] or lines % _ALIGNMENT != 0 or contraction % _ALIGNMENT != 0
                # Codes are copied for the matrix units, or converted back to BF16 for an emulated product.
                per_element = 2 * _code_bytes(spec) * copied if runs else _code_bytes(spec) + 2
                cast += sizes[i] * per_element
        if path == "wgrad" and not config.high_precision:
            plain += 2 * weight
        if config.high_precision:
            plain = converted[path]
        base = _gemm_us(GemmConfig(), rows, contraction, columns, rates, native=True)
        assert base is not None
        paths[path] = PathPrice(
            bf16_us=base + _us(converted[path], rates.copy_tb_s),
            gemm_us=us,
            cast_us=_us(cast, rates.cast_tb_s) + _us(plain, rates.copy_tb_s),
        )
    return LayerPrice(m, paths, all(rates.within(*shape) for shape in shapes.values()))


def _gemm_us(
    gemm: GemmConfig, rows: int, contraction: int, columns: int, rates: Rates, *, native: bool
) -> float | None:
    low = native and not gemm.high_precision
    if low:
        rows, contraction, columns = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in (rows, contraction, columns))
    tflops = rates.tflops(variant_of(gemm) if low else BF16, rows, contraction, columns)
    if tflops is None:
        return None
    width = 1 if low else 2
    moved = width * contraction * (rows + columns) + 2 * rows * columns
    return max(_us(2 * rows * contraction * columns, tflops), _us(moved, rates.copy_tb_s))


def _us(work: float, tera_a_second: float) -> float:
    return work / (tera_a_second * 1e6)


def _code_bytes(spec: Spec) -> float:
    """Stored bytes of one code: FP4 is packed, FP6 takes a whole byte."""
    return 0.5 if spec.fmt.element.bits == 4 else 1.0
