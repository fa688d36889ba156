"""Test top-1 and top-5 accuracy, and that each example counts once over all ranks."""

import pytest
import torch
from evaluating import Tiny, folder, shards
from ranks import on_ranks

from batchnorm.data import Normalize, open_images
from batchnorm.evaluate import Accuracy, Crops, count_correct, evaluate_networks, open_squares, score
from batchnorm.evaluate.accuracy import label_ranks

SIZES = [(40 + 3 * k, 36) for k in range(14)]


def test_ranks_are_those_of_a_stable_sort():
    scores = torch.randint(0, 4, (50, 7)).float()
    labels = torch.randint(0, 7, (50,))
    order = scores.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(label_ranks(scores, labels), (order == labels[:, None]).int().argmax(1))


def test_a_score_that_is_not_a_number_is_behind_all():
    assert label_ranks(torch.full((1, 4), float("nan")), torch.tensor([0])).item() >= 3


def test_score_against_a_loop():
    probabilities = torch.rand(200, 9).softmax(1)
    labels = torch.randint(0, 9, (200,))
    found = score(probabilities, labels)
    bins = [[] for _ in range(15)]
    right1 = right5 = loss = 0.0
    for p, y in zip(probabilities.double(), labels, strict=True):
        best = p.argsort(descending=True)
        right1 += best[0] == y
        right5 += y in best[:5]
        loss -= p[y].log()
        bins[min(14, int(p.max() * 15))].append((float(best[0] == y), float(p.max())))
    gaps = [abs(sum(a for a, _ in b) - sum(c for _, c in b)) for b in bins if b]
    expected = (200, 1 - right1 / 200, 1 - right5 / 200, loss / 200, sum(gaps) / 200, 9)
    torch.testing.assert_close(torch.tensor(found), torch.tensor([float(v) for v in expected]))


def test_the_top_5_error_of_few_classes_is_0_and_not_shown():
    assert score(torch.tensor([[0.9, 0.1]]), torch.tensor([1])).top5_error == 0.0
    shown = ["top-5" in str(score(torch.full((1, classes), 0.1), torch.tensor([0]))) for classes in (5, 6)]
    assert shown == [False, True]


def test_folders_and_shards_and_training_agree(tmp_path):
    folder(tmp_path / "folder", SIZES)
    shards(tmp_path / "shards", SIZES)
    found = [
        evaluate_networks({"net": Tiny}, open_squares(tmp_path / kind, crops=Crops.of(1, size=32), batch_size=4)).score
        for kind in ("folder", "shards")
    ]
    batches = open_images(tmp_path / "folder", "val", size=32, batch_size=5, train=False)
    loss = torch.zeros(1, dtype=torch.float64)
    accuracy = Accuracy.of(count_correct(Tiny(), batches.epoch(0), Normalize(), loss=loss))
    assert found[0].examples == found[1].examples == accuracy.examples == len(SIZES)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]))
    assert 1 - found[0].top1_error == pytest.approx(accuracy.top1)
    assert loss.item() / accuracy.examples == pytest.approx(found[0].log_loss, rel=1e-4)
    assert 0 < accuracy.top1 < 1


def one_rank(rank, world_size, path, count, batch_size):
    torch.use_deterministic_algorithms(True)
    batches = open_squares(
        path, crops=Crops.of(count, size=32), batch_size=batch_size, rank=rank, world_size=world_size
    )
    seen = [k for squares in batches for k in squares.examples.tolist()]
    networks = {f"net-{seed}": lambda seed=seed: Tiny(seed=seed) for seed in range(2)}
    return seen, evaluate_networks(networks, batches, batch_size=batch_size)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_example_counts_once_over_ranks(tmp_path, world_size):
    # A step has 4 images per rank. The last step of the 14 images is not full; with 3 ranks, one rank gets no image.
    folder(tmp_path, SIZES)
    (tmp_path / "val" / "ant" / "000.png").write_bytes(b"not an image")
    alone, expected = one_rank(0, 1, tmp_path, 1, 4)
    results = on_ranks(world_size, one_rank, tmp_path, 1, 4)
    seen = [k for examples, _ in results for k in examples]
    assert sorted(seen) == sorted(alone)
    assert len(seen) == 13
    for _, report in results:
        assert report.crops == 1
        assert report.disagreement == pytest.approx(expected.disagreement)
        assert [file.name for file in report.corrupt] == [str(tmp_path / "val" / "ant" / "000.png")]
        for member, other in zip(report.members, expected.members, strict=True):
            assert member.alone == pytest.approx(other.alone, abs=1e-6)
            assert member.together == pytest.approx(other.together, abs=1e-6)


def messages(rank, world_size, path):
    """Return this rank's errors; the last rank has no images, but must raise as well instead of waiting forever."""
    batches = open_squares(path, crops=Crops.of(1, size=32), rank=rank, world_size=world_size)
    found = []
    for net in (Tiny(classes=5), Tiny(sharpness=float("nan"))):
        with pytest.raises(ValueError, match="wrong gives") as error:
            evaluate_networks({"wrong": lambda net=net: net}, batches)
        found.append(str(error.value))
    return found


@pytest.mark.dist
def test_all_ranks_stop_where_one_would(tmp_path):
    folder(tmp_path, SIZES[:3])
    for classes, diverged in on_ranks(4, messages, tmp_path):
        assert classes.startswith("wrong gives 5 scores per image, but the data has 3 classes")
        assert diverged.startswith("wrong gives NaN or infinite probabilities for 3 of 3 images")
