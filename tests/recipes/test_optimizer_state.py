"""``optimizer.state`` of a recipe: the names and the seed that random bits are drawn by, every optimizer of ours."""

from __future__ import annotations

import copy
import pickle
from typing import cast

import pytest
import torch
from narrowgate.models.optimizers import AdamWithRowwiseAdagrad
from narrowgate.precision import NarrowgateError, call_key, optimizer_state, quantize, stream_key
from narrowgate.recipes import (
    OptimizerState,
    Recipe,
    Rule,
    apply_recipe,
    low_precision,
    remove_recipe,
    resolve,
    validate_file,
    wrap_optimizer,
)
from torch import nn

RULES = [Rule(layers="interaction.*", all="fp8_e4m3")]


def recipe(state: str) -> Recipe:
    return Recipe(name="r", rules=RULES, optimizer=OptimizerState(state=state))


def test_random_bits_are_drawn_by_the_models_names_and_the_recipes_seed(tower, ids):
    plan = apply_recipe(tower, recipe("bf16+sr"), seed=11)
    optimizer = plan.wrap_optimizer(torch.optim.Adam(tower.parameters(), betas=(0.9, 0.99)))
    tower(ids).square().mean().backward()
    optimizer.step()
    for name in ("embedding.weight", "interaction.2.weight", "heads.1.bias"):
        parameter = tower.get_parameter(name)
        assert parameter.grad is not None
        moment = torch.lerp(torch.zeros_like(parameter), parameter.grad, 1 - 0.9)
        key = call_key(stream_key(11, name, "optimizer", "exp_avg"), 1)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], quantize(moment, "bf16+sr", seed=key).data)


def test_a_compiled_model_has_the_same_names(make_tower, ids):
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: nn.Module = make_tower()
        if compiled:  # _orig_mod stands before every name
            model = cast("nn.Module", torch.compile(model, backend="eager"))
        plan = apply_recipe(model, recipe("bf16+sr"))
        optimizer = plan.wrap_optimizer(torch.optim.Adam(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
        runs.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("state", ["bf16+sr", "fp8_e4m3/1x16"])
def test_adam_with_rowwise_adagrad_keeps_its_accumulators_and_stores_its_moments(make_tower, ids, state):
    model = make_tower(width=64)
    plan = apply_recipe(model, recipe(state))
    tables = [model.embedding.weight]
    dense = [parameter for parameter in model.parameters() if parameter is not tables[0]]
    optimizer = plan.wrap_optimizer(AdamWithRowwiseAdagrad(dense, tables, lr=0.01, table_lr=0.1))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert optimizer.state[tables[0]].keys() == {"sum"}
    assert optimizer.state[tables[0]]["sum"].dtype == torch.float32
    stored = {optimizer.state[layer.weight]["exp_avg"].dtype for layer in model.interaction}
    assert stored == {torch.bfloat16 if state == "bf16+sr" else torch.float8_e4m3fn}


def test_tables_that_have_no_moments_are_stepped_together_however_large_they_are(make_tower, ids, monkeypatch):
    monkeypatch.setattr(optimizer_state, "BUCKET", 1)
    model = make_tower(width=64)
    plan = apply_recipe(model, recipe("bf16"))
    tables = [model.embedding.weight, nn.Parameter(torch.ones(3, 64))]
    dense = [parameter for parameter in model.parameters() if parameter is not tables[0]]
    stepped: list[list[int]] = []

    class Watched(AdamWithRowwiseAdagrad):
        def _in_one_launch(self, tables, group):
            stepped.append(list(map(id, tables)))
            return super()._in_one_launch(tables, group)

    optimizer = plan.wrap_optimizer(Watched(dense, tables, lr=0.01, table_lr=0.1))
    together = list(map(id, tables))
    # The first step makes the accumulators; until then nobody knows that there are no moments.
    for expected in ([[table] for table in together], [together]):
        stepped.clear()
        model(ids).square().mean().backward()
        tables[1].grad = torch.ones_like(tables[1])
        optimizer.step()
        assert stepped == expected


def test_a_plan_knows_its_model_only_where_a_recipe_was_applied(tower):
    optimizer = torch.optim.Adam(tower.parameters())
    with pytest.raises(NarrowgateError, match="found a plan without its model, expected what apply_recipe returned"):
        resolve(recipe("bf16"), tower).wrap_optimizer(optimizer)
    assert resolve(recipe("fp32"), tower).wrap_optimizer(optimizer) is optimizer
    plan = apply_recipe(tower, recipe("bf16"))
    assert pickle.loads(pickle.dumps(plan)).model is None
    assert copy.copy(plan) == plan
    assert plan.with_trace(plan.trace).model is plan.model  # type: ignore[arg-type]


def test_state_that_is_rounded_to_nearest_is_warned_of_where_it_stands(tower, tmp_path):
    base, path = tmp_path / "base.yaml", tmp_path / "r.yaml"
    base.write_text("recipe: base\noptimizer: {state: fp8_e4m3/1x128}\n")
    path.write_text("recipe: r\nextends: base.yaml\n")
    expected = (
        f"{base}:2:20: warning: optimizer.state: fp8_e4m3/1x128 rounds to nearest, so a second moment that decays "
        "slowly stands still; fp8_e4m3/1x128+sr follows it"
    )
    assert [str(warning) for warning in resolve(path, tower).warnings] == [expected]
    assert [str(finding) for finding in validate_file(path).diagnostics] == [expected]
    assert validate_file(path).ok
    for state in ("bf16+sr", "fp32"):
        path.write_text(f"recipe: r\noptimizer: {{state: {state}}}\n")
        assert not resolve(path, tower).warnings


def test_a_decorated_model_needs_no_plan(tower_class, ids):
    """The same bits as by a plan, after a copy too."""
    runs = []
    for decorated in (True, False):
        torch.manual_seed(0)
        if decorated:
            model = copy.deepcopy(low_precision(recipe("bf16+sr"), seed=4)(lambda: tower_class())())
            optimizer = wrap_optimizer(model, torch.optim.Adam(model.parameters()))
        else:
            model = tower_class()
            plan = apply_recipe(model, recipe("bf16+sr"), seed=4)
            optimizer = plan.wrap_optimizer(torch.optim.Adam(model.parameters()))
        model(ids).square().mean().backward()
        optimizer.step()
        runs.append([optimizer.state[p]["exp_avg"] for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_models_without_one_word_on_optimizer_state_are_refused(tower, ids):
    optimizer = torch.optim.Adam(tower.parameters())
    with pytest.raises(NarrowgateError, match="found no recipe on this Tower, expected one to wrap an optimizer for"):
        wrap_optimizer(tower, optimizer)
    apply_recipe(tower.interaction, Recipe(name="a", rules=[Rule(layers="0", all="fp8_e4m3")]))
    assert type(wrap_optimizer(tower, optimizer)) is torch.optim.Adam
    apply_recipe(tower.heads, Recipe(name="b", optimizer=OptimizerState(state="bf16+sr")))
    with pytest.raises(
        NarrowgateError, match=r"'a' asks for optimizer state in fp32 and 'b' for bf16\+sr, expected one"
    ):
        wrap_optimizer(tower, optimizer)


def test_an_optimizer_that_was_not_wrapped_is_missed_once(make_tower, ids, recwarn):
    for wrapped in (True, False):
        model = make_tower()
        plan = apply_recipe(model, recipe("bf16+sr"))
        optimizer = torch.optim.Adam(model.parameters())
        if wrapped:
            plan.wrap_optimizer(optimizer)
        other = torch.nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        torch.optim.Adam([other]).step()
        for _ in range(2):
            model(ids).sum().backward()
            optimizer.step()
    # Libraries warn of other things.
    told = [text for w in recwarn.list if (text := str(w.message)).startswith("recipe '")]
    assert told == [
        "recipe 'r' asks for optimizer state in bf16+sr, this Adam keeps its own: expected "
        "plan.wrap_optimizer(optimizer), or narrowgate.recipes.wrap_optimizer(model, optimizer)"
    ]


def test_the_tables_own_optimizer_is_not_the_one_that_the_recipe_means(tower, ids, recwarn):
    tower.embedding.sparse = True
    plan = apply_recipe(tower, recipe("bf16+sr"))
    tables = torch.optim.SparseAdam([tower.embedding.weight])
    dense = torch.optim.Adam([p for name, p in tower.named_parameters() if name != "embedding.weight"])

    def step() -> list[str]:
        tower(ids).square().mean().backward()
        tables.step()
        dense.step()
        return [str(warning.message) for warning in recwarn if "asks for" in str(warning.message)]

    plan.wrap_optimizer(dense)
    assert step() == []
    unwrapped = torch.optim.Adam([tower.interaction[0].weight])
    remove_recipe(tower)
    apply_recipe(tower, recipe("bf16+sr"))
    tables.step()
    unwrapped.step()  # and the one that it means is still told
    assert [str(w.message) for w in recwarn if "asks for" in str(w.message)] == [
        "recipe 'r' asks for optimizer state in bf16+sr, this Adam keeps its own: expected "
        "plan.wrap_optimizer(optimizer), or narrowgate.recipes.wrap_optimizer(model, optimizer)"
    ]
