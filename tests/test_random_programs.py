"""Test fold, convert and insert on random programs with shared modules, in-place code, aliases and branches."""

import copy

import pytest
import torch
from fuzz import Program, example
from networks import scramble_

import batchnorm as bn

CLOSE = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(params=range(12))
def program(request):
    return scramble_(Program(request.param)).double(), example(request.param), example(request.param + 1000)


def evaluated(net, x):
    return copy.deepcopy(net).eval()(x.clone())


def test_fold(program):
    net, x, y = program
    folded = bn.fold(net, x)
    torch.testing.assert_close(folded(y.clone()), evaluated(net, y), **CLOSE)


def test_convert(program):
    net, x, y = program
    converted = bn.convert(net, x)
    torch.testing.assert_close(evaluated(converted, y), evaluated(net, y), **CLOSE)
    torch.testing.assert_close(
        copy.deepcopy(converted).train()(y.clone()), copy.deepcopy(net).train()(y.clone()), **CLOSE
    )


def test_insert_identity(program):
    net, x, y = program
    inserted = bn.insert(net, x, init="identity", batches=[x])
    torch.testing.assert_close(evaluated(inserted, y), evaluated(net, y), **CLOSE)
    folded = bn.fold(inserted, x)
    torch.testing.assert_close(folded(y.clone()), evaluated(net, y), **CLOSE)
