"""Compare means over crops and networks with plain loops, and test memory use (one network at a time) and bad input."""

import gc
import weakref

import pytest
import torch
from evaluating import CLASSES, Tiny, folder
from torch import nn

from batchnorm.data import Normalize
from batchnorm.evaluate import Crops, Ensemble, evaluate_networks, open_squares, predict
from batchnorm.evaluate.predictions import cut_views
from batchnorm.evaluate.square_crops import cut_squares, decode

SIZES = [(44, 36), (36, 50), (40, 40), (120, 36), (20, 20), (64, 40)]


def by_hand(net, batches):
    """Average over crops in a loop, one crop at a time; a square image has only one square, which is repeated."""
    crops, rows = batches.crops, []
    for k in range(len(batches.source.labels)):
        image = decode(batches.source.read(k))
        total, count = 0.0, 0
        for level in cut_squares(image, crops):
            squares = level.movedim(-1, 1)
            squares = squares.expand(crops.squares, -1, -1, -1) if len(squares) == 1 else squares
            for view in cut_views(squares.contiguous(), crops).flatten(0, 1):
                total, count = total + net(Normalize()(view[None])).double().softmax(1)[0], count + 1
        assert count == crops.count
        rows.append(total / count)
    return torch.stack(rows)


@pytest.mark.parametrize("count", [10, 144])
@pytest.mark.parametrize("batch_size", [8, 500])
@torch.no_grad()
def test_the_mean_over_crops(tmp_path, count, batch_size):
    folder(tmp_path, SIZES)
    batches = open_squares(tmp_path, crops=Crops.of(count, size=32), batch_size=batch_size)
    found = predict(Tiny(), batches, batch_size=batch_size)
    torch.testing.assert_close(found.probabilities.double(), by_hand(Tiny(), batches), atol=1e-5, rtol=1e-5)
    assert found.examples.tolist() == list(range(len(SIZES)))
    assert found.enlarged == 1


def test_workers_change_nothing(tmp_path):
    folder(tmp_path, SIZES)
    crops = Crops.of(144, size=32)
    a, b = (predict(Tiny(), open_squares(tmp_path, crops=crops, batch_size=24, workers=w)) for w in (0, 2))
    assert torch.equal(a.probabilities, b.probabilities)


def test_the_mean_over_networks():
    labels = torch.randint(0, 6, (40,))
    members = [torch.randn(40, 6).mul(2).softmax(1) for _ in range(4)]
    ensemble = Ensemble()
    for k, probabilities in enumerate(members):
        member = ensemble.add(f"net-{k}", probabilities, labels)
        right = torch.stack(members[: k + 1]).mean(0).argmax(1) == labels
        assert member.together.top1_error == pytest.approx(1 - right.float().mean().item())
    choices = torch.stack([m.argmax(1) for m in members])
    pairs = [(choices[i] != choices[j]).float().mean() for i in range(4) for j in range(i)]
    assert ensemble.disagreement() == pytest.approx(torch.stack(pairs).mean().item())


def test_one_network_is_in_memory_at_a_time_and_its_mode_comes_back(tmp_path):
    folder(tmp_path, SIZES[:3])
    alive: list[weakref.ref] = []

    def load(seed):
        gc.collect()
        assert not [net for ref in alive if (net := ref()) is not None]
        net = Tiny(seed=seed)
        alive.append(weakref.ref(net))
        return net

    batches = open_squares(tmp_path, crops=Crops.of(1, size=32))
    report = evaluate_networks({f"net-{k}": lambda k=k: load(k) for k in range(4)}, batches)
    assert [member.name for member in report.members] == ["net-0", "net-1", "net-2", "net-3"]
    net = nn.Sequential(Tiny(), nn.Dropout(0.9).eval()).train()
    net[1].eval()
    predict(net, batches)
    assert [m.training for m in net] == [True, False]


def test_the_report_says_what_happened_to_the_images(tmp_path):
    folder(tmp_path, SIZES)
    (tmp_path / "val" / "bee" / "broken.png").write_bytes(b"\x89PNG nonsense")
    report = evaluate_networks({"a": Tiny, "b": lambda: Tiny(seed=1)}, open_squares(tmp_path, crops=Crops.of(10, 32)))
    text = str(report)
    assert "6 images, 10 crops of each" in text
    assert "1 images are smaller than the crop and were enlarged" in text
    assert "broken.png" in text
    assert "two networks disagree on" in text
    assert len(evaluate_networks({"a": Tiny}, open_squares(tmp_path, crops=Crops.of(1, 32))).members) == 1


def test_an_empty_class(tmp_path):
    folder(tmp_path, SIZES[:2])
    with pytest.raises(ValueError, match=r"has no images for 1 of 3 classes in split 'val' \(cat\)"):
        open_squares(tmp_path, crops=Crops.of(1, 32))


def test_a_missing_class(tmp_path):
    folder(tmp_path, SIZES, split="train")
    folder(tmp_path, SIZES, classes=CLASSES[:2])
    with pytest.raises(ValueError, match=r"has no images for 1 of 3 classes in split 'val' \(cat\)"):
        open_squares(tmp_path, crops=Crops.of(1, 32))


def test_no_images(tmp_path):
    folder(tmp_path, [])
    with pytest.raises(FileNotFoundError, match="no images"):
        open_squares(tmp_path, crops=Crops.of(1, 32))
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        open_squares(tmp_path / "nowhere", crops=Crops.of(1, 32))
    with pytest.raises(FileNotFoundError, match="neither test/"):
        open_squares(tmp_path, "test", crops=Crops.of(1, 32))


def test_no_readable_images(tmp_path):
    folder(tmp_path, SIZES[:3])
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no examples to score a on"):
        evaluate_networks({"a": Tiny}, open_squares(tmp_path, crops=Crops.of(1, 32)))


class Tuple(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: Tiny(classes=7), "wrong gives 7 scores per image, but the data has 3 classes"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), "wrong raises an error for images of 3x32x32"),
        (lambda: nn.Flatten(0), r"wrong returns a tensor of shape \(3072,\) for one image"),
        (Tuple, "wrong returns a tuple for one image: it must return a tensor"),
        (lambda: Tiny(sharpness=float("nan")), "wrong gives NaN or infinite probabilities for 6 of 6 images"),
    ],
    ids=["classes", "architecture", "vector", "tuple", "diverged"],
)
def test_a_network_that_does_not_fit(tmp_path, network, message):
    folder(tmp_path, SIZES)
    with pytest.raises(ValueError, match=message):
        evaluate_networks({"good": Tiny, "wrong": network}, open_squares(tmp_path, crops=Crops.of(1, 32)))


def test_what_cannot_be_combined(tmp_path):
    folder(tmp_path, SIZES)
    with pytest.raises(ValueError, match="no networks"):
        evaluate_networks({}, open_squares(tmp_path, crops=Crops.of(1, 32)))
    ensemble = Ensemble()
    ensemble.add("a", torch.eye(3), torch.arange(3))
    with pytest.raises(ValueError, match="b was not evaluated on the same data as a"):
        ensemble.add("b", torch.eye(3), torch.tensor([2, 1, 0]))


def test_a_network_that_is_refused_leaves_the_ensemble_as_it_was():
    ensemble = Ensemble()
    with pytest.raises(ValueError, match="a"):
        ensemble.add("a", torch.full((3, 3), torch.nan), torch.arange(3))
    ensemble.add("b", torch.eye(2), torch.arange(2))
    with pytest.raises(ValueError, match="c"):
        ensemble.add("c", torch.full((2, 2), torch.nan), torch.arange(2))
    torch.testing.assert_close(ensemble.mean(), torch.eye(2))
