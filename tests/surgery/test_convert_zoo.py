"""Real networks: nearly every BN that feeds an activation takes it in, and all compute what they computed."""

import copy

import pytest
import torch
from exported import feeding
from torch import nn

import batchnorm as bn
from batchnorm.graph.rewrite import fusions_in
from batchnorm.ops.activation import NAMES

pytestmark = [pytest.mark.zoo, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NETWORKS = """resnet18 resnet50 resnext50_32x4d mobilenet_v2 mobilenet_v3_large googlenet inception_v3 densenet121
efficientnet_b0 regnet_y_400mf shufflenet_v2_x1_0 mnasnet1_0 vgg16_bn timm:resnet50 timm:efficientnet_lite0
timm:efficientnet_b0 timm:mobilenetv3_large_100 timm:regnety_004 timm:densenet121 timm:ghostnet_100 timm:dla34
timm:res2net50_26w_4s timm:repvgg_a0 timm:xception41 timm:hrnet_w18_small""".split()  # noqa: SIM905
SPELLINGS = {"hardtanh": "relu6", "hardtanh_": "relu6"}


def make(name):
    try:
        import torchvision
    except RuntimeError:  # its compiled operators do not fit this build of torch, and are not needed
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        make.library = library
        torchvision = pytest.importorskip("torchvision")
    if name.startswith("timm:"):
        return pytest.importorskip("timm").create_model(name[5:], pretrained=False)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_batch_norms_that_feed_an_activation_take_it_in(name):
    torch.manual_seed(0)
    net, side = make(name), 299 if name == "inception_v3" else 64
    x = torch.randn(2, 3, side, side)
    converted = bn.convert(net, x)
    print(converted.report.notes, converted.report.relative_error)
    own = {path for path, m in converted.named_modules() if isinstance(m, bn.layers.BatchNorm) and takes_its_own(m)}
    taken = own | {
        path for path, fs in fusions_in(converted).items() if all(f.activation.name != "identity" for f in fs)
    }
    groups = [(paths, kind) for paths, kind in feeding(copy.deepcopy(net), x)]
    fusable = [paths for paths, kind in groups if SPELLINGS.get(kind, kind.rstrip("_")) in NAMES]
    missing = [paths for paths in fusable if not paths & taken]
    print(name, len(groups), len(fusable), len(missing), missing[:5])
    assert len(missing) <= 0.05 * len(fusable)


def takes_its_own(layer):
    act = getattr(layer, "act", None)
    if isinstance(act, nn.Module):
        return bn.ops.activation.from_module(act) not in (None, bn.ops.activation.IDENTITY)
    return layer.activation.name != "identity"
