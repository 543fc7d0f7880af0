"""What the language allows and this version or a backend does not run: said by name and place, never passed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..precision.backends import LayerFacts, get_backend
from ..precision.config import OPERANDS, GemmConfig, LinearConfig
from ..precision.exchanged_rows import unsupported_rows
from ..precision.saved_formats import unsupported_save
from ..precision.spec import Spec
from ..precision.state_formats import unsupported_state
from .errors import Diagnostic
from .plan import Plan
from .recipe import OptimizerState, Recipe, Rule, at_rule
from .saved_activations import lossy_layers, save_format


def not_built_in_recipe(recipe: Recipe, backend: str | None = None) -> list[Diagnostic]:
    """Return what of ``recipe`` no model can run yet; ``backend`` overrides the recipe's."""
    findings = not_built_in_parts(recipe, backend)
    flat = recipe.flatten()
    chosen = get_backend(backend or flat.backend or "native")
    for index, rule in enumerate(flat.rules):
        config = rule_config(rule)
        for field, why in chosen.inexpressible(config, None, None).items():
            findings.append(at_rule(flat, index, field, f"{chosen.name} cannot express it: {why}"))
    return findings


def inexpressible_in_plan(plan: Plan) -> list[Diagnostic]:
    """Return what the plan's backend cannot express: one finding for each layer, field and reason."""
    backend = get_backend(plan.backend)
    findings: list[Diagnostic] = []
    for layer in plan.lowered:
        facts = LayerFacts(layer.name, layer.in_features, layer.out_features, linear=layer.kind == "linear")
        for field, why in backend.inexpressible(layer.config, facts, plan.device).items():
            what = "it" if field == "layers" else _told(layer.config, field)
            message = f"layer '{layer.name}': {backend.name} cannot express {what}: {why}"
            setter = layer.origin.get(field) or max(
                layer.origin.values(), key=lambda o: -1 if o.rule is None else o.rule
            )
            findings.append(at_rule(plan.recipe, setter.rule, field, message))
    together = backend.whole_model([layer.config for layer in plan.lowered])
    if together is not None:
        findings.append(_at_part(plan.recipe, "backend", "", f"{backend.name} cannot express it: {together}"))
    return [*findings, *_foreign_parts(plan.recipe, plan.backend)]


def _told(config: LinearConfig, field: str) -> str:
    path, _, part = field.partition(".")
    gemm: GemmConfig = getattr(config, path)
    if part == "accumulate":
        return f"accumulate: {gemm.accumulate}"
    return str(gemm.second if part == OPERANDS[path][1] else gemm.first)


def _foreign_parts(recipe: Recipe, backend: str) -> Iterator[Diagnostic]:
    """What only our own layers do beyond their products."""
    if backend == "native":
        return
    if recipe.shards is not None and recipe.shards.all_gather.format != "bf16":
        message = f"{backend} cannot express {recipe.shards.all_gather}: weights travel as bf16 there"
        yield _at_part(recipe, "shards", "all_gather", message)
    if recipe.activations is not None and recipe.activations.save != "operand":
        message = f"{backend} cannot express {recipe.activations.save}: what it saves for backward is its own choice"
        yield _at_part(recipe, "activations", "save", message)


def not_built_in_parts(recipe: Recipe, backend: str | None = None) -> list[Diagnostic]:
    """Return what of ``recipe`` outside its rules cannot run yet; ``backend`` overrides the recipe's."""
    return list(_parts(recipe, backend))


def doubts_in_parts(recipe: Recipe) -> list[Diagnostic]:
    """Return warnings of what ``recipe`` asks for outside its rules, which runs and is seldom meant."""
    state = (recipe.flatten().optimizer or OptimizerState()).state
    if state.format == "fp32" or state.sr or unsupported_state(state) is not None:
        return []
    message = f"{state} rounds to nearest, so a second moment that decays slowly stands still; {state}+sr follows it"
    return [replace(_at_part(recipe, "optimizer", "state", message), severity="warning")]


def doubts_in_saved(recipe: Recipe, plan: Plan) -> list[Diagnostic]:
    """Return a warning where layers multiply BF16 in wgrad by an input that was kept in low precision."""
    lossy = lossy_layers(plan)
    if not lossy:
        return []
    count, first = len(lossy), lossy[0].name or "(root)"
    message = (
        f"lossy: {count} layer{'s' * (count > 1)} with a BF16 wgrad multipl{'y' if count > 1 else 'ies'} by an input "
        f"kept as {save_format(recipe)}, first '{first}'"
    )
    return [replace(_at_part(recipe, "activations", "save", message), severity="warning")]


def _parts(recipe: Recipe, backend: str | None) -> Iterator[Diagnostic]:
    flat = recipe.flatten()
    if flat.shards is not None:
        gather, reduce = flat.shards.all_gather, flat.shards.reduce_scatter
        built = _built_gather(gather)
        if built is not None:
            yield _at_part(recipe, "shards", "all_gather", f"{gather} is not built yet, only {built}")
        if reduce is not None and (reducible := _built_reduce(reduce)) is not None:
            yield _at_part(recipe, "shards", "reduce_scatter", f"{reduce} is not built yet, only {reducible}")
        for way in ("forward", "backward") if flat.shards.tables is not None else ():
            rows = getattr(flat.shards.tables, way)
            if (travels := unsupported_rows(rows)) is not None:
                yield _at_part(recipe, "shards", f"tables.{way}", f"{rows} is not built yet, only {travels}")
    save = None if flat.activations is None else flat.activations.save
    if isinstance(save, Spec) and (savable := unsupported_save(save)) is not None:
        yield _at_part(recipe, "activations", "save", f"{save} is not built yet, only operand, {savable}")
    if flat.optimizer is not None and (kept := unsupported_state(flat.optimizer.state)) is not None:
        yield _at_part(recipe, "optimizer", "state", f"{flat.optimizer.state} is not built yet, only {kept}")


def _built_gather(spec: Spec) -> str | None:
    """What is built instead of gathering ``spec``; None where that is."""
    if spec.format == "bf16" and not spec.sr:
        return None
    if spec.high_precision:
        return "bf16 and formats below it"
    if spec.sr or _modified(spec):
        return "codes rounded to nearest, with dynamic scales of unclipped values"
    return None


def _built_reduce(spec: Spec) -> str | None:
    """What is built instead of reducing as ``spec``; None where that is."""
    if spec.format == "bf16":
        return None
    if spec.fmt.element.bits != 8 or spec.fmt.block_scaled:
        return "bf16 and FP8 with FP32 scales (FSDP2's MixedPrecisionPolicy has other dtypes)"
    return "FP8 with dynamic scales of unclipped values" if _modified(spec) else None


def _modified(spec: Spec) -> bool:
    """Whether values are changed before they are scaled, or scaled by what they were."""
    clipped = spec.clip_p is not None or spec.clip_rms is not None
    return clipped or spec.delayed is not None or spec.hadamard is not None


def _at_part(recipe: Recipe, part: str, key: str, message: str) -> Diagnostic:
    """Point into the recipe of the ``extends`` chain that sets ``part``."""
    owner = recipe
    while getattr(owner, part) is None and owner.base is not None:
        owner = owner.base
    field = f"{part}.{key}" if key else part
    source = owner.source
    if source is None:
        return Diagnostic(field=field, message=message)
    line, column = source.locate(field)
    return Diagnostic(file=source.file, line=line, column=column, field=field, message=message)


def rule_config(rule: Rule) -> LinearConfig:
    """Return what one rule asks of a layer by itself, with BF16 for all that it leaves alone."""
    settings, bf16 = rule.settings(), Spec(format="bf16")
    gemms: dict[str, GemmConfig] = {}
    for path, operands in OPERANDS.items():
        first, second = (settings.get(f"{path}.{operand}", bf16) for operand in operands)
        assert isinstance(first, Spec)
        assert isinstance(second, Spec)
        gemms[path] = GemmConfig(first, second, str(settings.get(f"{path}.accumulate", "accurate")))
    return LinearConfig(**gemms)
