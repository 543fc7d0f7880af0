"""Prices on a plan, and what ``when: profitable`` makes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath

from ..precision.capability import Support
from ..precision.config import PATHS, LinearConfig
from .errors import Diagnostic
from .plan import LayerPlan, Plan
from .pricing import LayerPrice, Unpriced, price_layer
from .rates import Rates, device_rates, load_rates, shipped_rates
from .recipe import at_rule
from .rows import check_rows

_BF16 = LinearConfig()
_NATIVE = Support(native=True)
_NEVER_CALLED = Unpriced("the batch never reached it")


def price_plan(
    plan: Plan,
    weights: Sequence[object],
    rows: Mapping[str, int] | int | None,
    rates: Rates | str | FilePath | None,
) -> Plan:
    """Return ``plan`` with a price on every layer, and BF16 where a profitable layer does not pay.

    Args:
        plan: as the rules say.
        weights: what each layer's weight is known by; tied layers have the same, and are decided together.
        rows: M by layer name, one number for all layers, or None where unknown.
        rates: measured rates or a file of them; None is what ships for the plan's device.
    """
    names = [layer.name for layer in plan.layers]
    known = check_rows(rows, names)
    if rates is None:
        rates = device_rates(plan.device)
    elif not isinstance(rates, Rates):
        rates = load_rates(rates)
    plan = replace(plan, rows=known, rates=rates)
    if plan.no_prices is not None:
        return plan
    assert known is not None
    assert rates is not None
    prices = [_price(layer, layer.config, known, rates) for layer in plan.layers]
    groups: dict[object, list[int]] = defaultdict(list)
    for index, weight in enumerate(weights):
        groups[weight].append(index)
    layers = list(plan.layers)
    for members in groups.values():
        reason = _why_not([(plan.layers[i], prices[i]) for i in members])
        for i in members:
            layer = plan.layers[i]
            if reason is not None and not layer.config.high_precision:
                support = dict.fromkeys(PATHS, _NATIVE)
                price = _price(layer, _BF16, known, rates)
                layers[i] = replace(layer, config=_BF16, support=support, price=price, kept=reason, in_turns=None)
            else:
                layers[i] = replace(layer, price=prices[i])
    losing = [_warning(plan, layer) for layer in layers if isinstance(layer.price, LayerPrice) and not layer.pays]
    return replace(plan, layers=tuple(layers), warnings=(*plan.warnings, *losing))


def undecided(plan: Plan) -> list[Diagnostic]:
    """Return, for each rule that says ``when: profitable``, what is missing to decide its layers."""
    findings: dict[Diagnostic, None] = {}
    for layer in plan.lowered:
        if layer.when != "profitable" or isinstance(layer.price, LayerPrice):
            continue
        rule = layer.origin["when"].rule
        assert rule is not None, "when defaults to always"
        if plan.backend != "native":
            missing = f"prices of the native backend's layers, and has none for {plan.backend}"
        elif isinstance(layer.price, Unpriced):
            missing = f"a price for layer '{layer.name}': {layer.price.reason}"
        else:
            needs = []
            if plan.rows is None:
                needs.append("the rows of each layer: give apply_recipe rows={...} or sample=lambda: model(batch)")
            if plan.rates is None:
                needs.append(f"{_no_rates(plan)}; give rates=FILE, as scripts/bench_gemm_rates writes it")
            missing = ", and ".join(needs)
        findings[at_rule(plan.recipe, rule, "when", f"profitable needs {missing}")] = None
    return list(findings)


def _no_rates(plan: Plan) -> str:
    return f"measured rates, and {plan.device.name} has none (measured: {', '.join(shipped_rates())})"


def _price(layer: LayerPlan, config: LinearConfig, rows: Mapping[str, int], rates: Rates) -> LayerPrice | Unpriced:
    if layer.kind in ("grouped", "product"):
        return Unpriced("only single matrices are priced")
    count = rows.get(layer.name)
    if count is None:
        return Unpriced("its rows are not given")
    if count == 0:
        return _NEVER_CALLED
    native = {path: support.native for path, support in layer.support.items()}
    return price_layer(config, count, layer.in_features, layer.out_features, rates, native)


def _why_not(members: list[tuple[LayerPlan, LayerPrice | Unpriced]]) -> str | None:
    """Say why layers that share a weight stay in BF16; None where they keep what the rules say."""
    lowered = [(layer, price) for layer, price in members if not layer.config.high_precision]
    if not lowered or any(layer.when != "profitable" for layer, _ in lowered):
        return None
    if all(price == _NEVER_CALLED for _, price in lowered):
        return _NEVER_CALLED.reason
    priced = [price for _, price in lowered if isinstance(price, LayerPrice)]
    if len(priced) < sum(price != _NEVER_CALLED for _, price in lowered):
        return None
    gain = sum(price.gain_us for price in priced)
    if gain > 0:
        return None
    return f"predicted {-gain:.1f} us slower at M={sum(price.rows for price in priced)}"


def _warning(plan: Plan, layer: LayerPlan) -> Diagnostic:
    price = layer.price
    assert isinstance(price, LayerPrice)
    field = next(
        f"{path}.{'input' if path == 'fprop' else 'grad'}" for path, g in layer.config.gemms() if not g.high_precision
    )
    message = (
        f"layer '{layer.name}' is predicted to lose time: {price.bf16_us:.1f} us in bf16, {price.us:.1f} us like this "
        f"({price.cast_us:.1f} us of it casts) at M={price.rows}"
    )
    return at_rule(plan.recipe, layer.origin[field].rule, field, message, severity="warning")
