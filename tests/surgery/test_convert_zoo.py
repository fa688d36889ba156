"""Test real networks: nearly every BN that feeds an activation fuses it, if the kernels support the activation."""

import pytest
import zoo
from blocks import fusions_in
from exported import feeding
from torch import nn

import batchnorm as bn
from batchnorm.layers import BatchNorm
from batchnorm.ops.activation import NAMES, from_module
from batchnorm.surgery.convert import AMPLIFIED

pytestmark = [pytest.mark.zoo, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NETWORKS = """tv:resnet18 tv:resnet50 tv:resnext50_32x4d tv:mobilenet_v2 tv:mobilenet_v3_large tv:googlenet
tv:inception_v3 tv:densenet121 tv:efficientnet_b0 tv:regnet_y_400mf tv:shufflenet_v2_x1_0 tv:mnasnet1_0 tv:vgg16_bn
resnet50 efficientnet_lite0 efficientnet_b0 mobilenetv3_large_100 regnety_004 densenet121 ghostnet_100 dla34
res2net50_26w_4s repvgg_a0 xception41 hrnet_w18_small mobileone_s0 seresnet18 seresnet50 ecaresnet26t resnetrs50
legacy_seresnet18 legacy_seresnext26_32x4d""".split()  # noqa: SIM905
EXPORTED_AS = {"hardtanh": "relu6"}


def applies_its_own(layer):
    act = getattr(layer, "act", None)
    activation = from_module(act) if isinstance(act, nn.Module) else layer.activation
    return activation is not None and activation.name != "identity"


@pytest.mark.parametrize("name", NETWORKS)
def test_batch_norms_take_in_the_activation_that_they_feed(name):
    try:
        zoo.import_torchvision()
    except ImportError as error:
        pytest.skip(f"the zoo needs torchvision: {error}")
    pytest.importorskip("timm", reason="the zoo needs timm")
    net, (x, _) = zoo.make(name)
    converted = bn.convert(net, x)
    # A few of these networks amplify rounding errors. It depends on the machine whether convert notes this.
    assert not set(converted.report.notes) - {AMPLIFIED}
    taken = {path for path, m in converted.named_modules() if isinstance(m, BatchNorm) and applies_its_own(m)}
    for path, fusions in fusions_in(converted).items():
        if all(fusion.activation.name != "identity" for fusion in fusions):
            taken.add(path)
    groups = [(paths, kind.rstrip("_")) for paths, kind in feeding(net, x)]
    fusable = [paths for paths, kind in groups if EXPORTED_AS.get(kind, kind) in NAMES]
    missing = [paths for paths in fusable if not paths & taken]
    print(f"{len(fusable) - len(missing)} of {len(groups)}; {converted.report.summary}")
    assert len(missing) <= 0.05 * len(fusable), missing
