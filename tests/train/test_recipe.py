"""Compare the recipes with a table of the paper's variants that was written independently of the code."""

import json
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.train import RECIPES, Recipe
from batchnorm.train.recipe import MEMBERS
from batchnorm.train.step import make_optimizer
from batchnorm.train.train_command import Overrides, RecipeName, resolve

LAMBDA, STAIR = 2e-4, 8.0
TABLE = {
    # normalization, nonlinearity, rate, dropout, L2, decay_epochs, local response, shuffling, photometric
    "inception": (False, "relu", 0.0015, 0.4, LAMBDA, STAIR, True, "fixed", "full"),
    "bn-baseline": (True, "relu", 0.0015, 0.4, LAMBDA, STAIR, True, "fixed", "full"),
    "bn-x5": (True, "relu", 0.0075, 0.0, LAMBDA / 5, STAIR / 6, False, "epoch", "reduced"),
    "bn-x30": (True, "relu", 0.045, 0.0, LAMBDA / 5, STAIR / 6, False, "epoch", "reduced"),
    "bn-x5-sigmoid": (True, "sigmoid", 0.0075, 0.0, LAMBDA / 5, STAIR / 6, False, "epoch", "reduced"),
    "inception-x5": (False, "relu", 0.0075, 0.4, LAMBDA, STAIR, True, "fixed", "full"),
    "inception-sigmoid": (False, "sigmoid", 0.0015, 0.4, LAMBDA, STAIR, True, "fixed", "full"),
}
FIELDS = (
    *("batch_norm", "activation", "rate", "dropout", "weight_decay", "decay_epochs"),
    *("local_response", "shuffle", "photometric"),
)


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    for field, expected in zip(FIELDS, TABLE[name], strict=True):
        assert getattr(recipe, field) == (pytest.approx(expected) if isinstance(expected, float) else expected), field
    # The fields outside the table, except the name and the number of epochs, are the same in all these recipes.
    others = {f.name for f in fields(Recipe)} - {*FIELDS, "name", "epochs"}
    assert all(getattr(recipe, field) == getattr(RECIPES["inception"], field) for field in others)
    assert (recipe.batch_size, recipe.momentum, recipe.decay) == (32, 0.9, 0.96)


def test_no_recipe_is_missing():
    assert set(RECIPES) == {*TABLE, *MEMBERS} == set(RecipeName.__args__)


def test_network_of_a_recipe():
    net = replace(RECIPES["bn-baseline"], width=0.1, size=32).network(5)
    kinds = [type(m) for m in net.modules()]
    assert sum(issubclass(kind, nn.LocalResponseNorm) for kind in kinds) == 2
    assert bn.BatchNorm2d in kinds
    assert net.dropout.p == 0.4
    synced = replace(RECIPES["bn-x30"], width=0.1, size=32, statistics="sync").network(5)
    assert all(m.statistics == bn.Sync() for m in synced.modules() if isinstance(m, bn.BatchNorm2d))


def test_same_seed_same_weights_whatever_the_variant():
    a, b = (replace(RECIPES[name], width=0.1, size=32).network(5) for name in ("inception", "bn-x30"))
    assert torch.equal(a.inception_4c.one.conv.weight, b.inception_4c.one.conv.weight)
    c = replace(RECIPES["inception"], width=0.1, size=32, seed=1).network(5)
    assert not torch.equal(a.inception_4c.one.conv.weight, c.inception_4c.one.conv.weight)


def test_weight_decay_spares_gamma_and_beta():
    recipe = replace(RECIPES["bn-x30"], width=0.1, size=32, per_activation=("5b",))
    net = recipe.network(5)
    decayed, rest = make_optimizer(net, recipe, torch.device("cpu")).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (pytest.approx(4e-5), 0.0)
    names = {id(p): name for name, p in net.named_parameters()}
    assert not any(".bn." in names[id(p)] for p in decayed["params"])
    assert all(".bn." in names[id(p)] for p in rest["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_six_times_faster_decay():
    base, fast = RECIPES["inception"], RECIPES["bn-x5"]

    def relative(recipe, epoch):
        return replace(recipe, rate=1.0).rate_at(epoch, steps_per_epoch=1)

    assert relative(base, 48) == pytest.approx(relative(fast, 8)) == pytest.approx(0.96**6)


def test_overrides():
    recipe = resolve(RECIPES["bn-x30"], Overrides(dropout=0.1, per_activation=("5b",), shuffle="fixed"))
    assert recipe == replace(RECIPES["bn-x30"], dropout=0.1, per_activation=("5b",), shuffle="fixed")
    assert resolve(RECIPES["bn-x5"], Overrides(local_response=False, rate=0.0)).rate == 0.0


def test_json_round_trip_and_foreign_fields():
    recipe = replace(RECIPES["bn-x5"], per_activation=("5a", "5b"))
    assert Recipe.from_json(recipe.to_json()) == recipe
    with pytest.raises(ValueError, match="unknown fields in the recipe: color"):
        Recipe.from_json('{"color": 1}')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation", "tanh"),
        ("batch_norm", 1),
        ("size", "large"),
        ("size", 32.5),
        ("per_activation", [1]),
        ("rate", True),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, field, value):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**json.loads(Recipe().to_json()), field: value}))
    with pytest.raises(
        ValueError, match=rf"recipe\.json is not a valid recipe for this version of batchnorm: {field} cannot be"
    ):
        Recipe.read(path)


def test_whole_numbers_are_numbers(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text('{"epochs": 3}')
    assert Recipe.read(path).epochs == 3
