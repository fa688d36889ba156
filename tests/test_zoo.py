"""Real networks of timm and torchvision; see zoo.py."""

import pytest
import zoo

# Together, these tests take long. The warnings come from timm's and torchvision's code.
pytestmark = [pytest.mark.zoo, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_fold_and_convert(name):
    try:
        zoo.import_torchvision()
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"the zoo needs torchvision: {error}")
    pytest.importorskip("timm", reason="the zoo needs timm")
    assert not zoo.check(name)["problems"]
