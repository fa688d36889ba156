"""Test ImageBatches: epochs, resuming, workers, ranks, the cache, and files that cannot be read."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pictures import contents, encoded, image_folder, sharded, smooth

import batchnorm as bn
from batchnorm.data import TooManyCorruptError, open_images
from batchnorm.data.loader import Prefetcher

SIZES = [(20 + k % 5, 24 - k % 7) for k in range(23)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    folder = image_folder(root / "folder", SIZES)
    image_folder(folder, SIZES[:11], split="val")
    return {"folder": folder, "shards": sharded(folder, root / "shards", per_shard=7)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Save images that are not uniform, so that different crops give different batches."""
    root = tmp_path_factory.mktemp("pictures")
    for k in range(14):
        file = root / "train" / f"class{k % 3}" / f"{k}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(smooth(40 + k, 60 - 2 * k, seed=k), "JPEG"))
    return root


def assert_same(first, second):
    for (a, la), (b, lb) in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(la, lb)


@pytest.mark.parametrize("layout", ["folder", "shards"])
@pytest.mark.parametrize("cache", ["none", "device"])
@given(st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 2))
def test_ranks_together_see_each_example_once(sets, layout, cache, batch_size, world_size, train, epoch):
    seen, labels, lengths = [], [], set()
    for rank in range(world_size):
        try:
            batches = open_images(
                sets[layout], size=4, batch_size=batch_size, train=train, rank=rank, world_size=world_size, cache=cache
            )
        except ValueError:
            assume(False)
        lengths.add(len(batches))
        for images, y in batches.epoch(epoch):
            seen += contents(images)
            labels += y.tolist()
    assert len(lengths) == 1
    assert sorted(seen) == list(range(len(SIZES)))
    # The classes of the images in the order in which they are stored.
    stored = sorted(k % 3 for k in range(len(SIZES)))
    assert [stored[k] for k in seen] == labels


@pytest.mark.parametrize("cache", ["none", "device"])
@settings(max_examples=15)
@given(st.integers(4, 9), st.integers(0, 3), st.data())
def test_resuming_at_any_step_gives_the_same_batches(pictures, cache, batch_size, epoch, data):
    def make():
        return open_images(pictures, size=16, batch_size=batch_size, train=True, seed=5, cache=cache)

    start = data.draw(st.integers(0, len(make())))
    assert_same(list(make().epoch(epoch))[start:], list(make().epoch(epoch, start)))


@pytest.mark.parametrize("cache", ["none", "device"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(pictures, workers, cache):
    options = {"size": 16, "batch_size": 4, "train": True, "cache": cache}
    alone, helped = (open_images(pictures, workers=w, **options) for w in (0, workers))
    state = torch.get_rng_state()
    for epoch, start in ((0, 0), (3, 1), (3, 2), (1, len(alone))):
        assert_same(alone.epoch(epoch, start), helped.epoch(epoch, start))
    assert torch.equal(state, torch.get_rng_state())


def test_an_epoch_may_be_left_in_the_middle(pictures):
    batches = open_images(pictures, size=16, batch_size=4, train=True, workers=2)
    whole = list(batches.epoch(0))
    for _ in range(3):
        iterator = batches.epoch(0)
        next(iterator)
        next(iterator)
    assert_same(batches.epoch(0), whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_epochs_at_a_time_are_refused(pictures, workers):
    batches = open_images(pictures, size=16, batch_size=4, train=True, workers=workers)
    first = batches.epoch(0)
    next(first)
    next(batches.epoch(1))
    with pytest.raises(RuntimeError, match="open the data twice"):
        next(first)


def test_a_sequence_that_was_never_read_is_refused_too():
    read = Prefetcher([10, 11, 12], workers=0, device=torch.device("cpu"))
    first, second = read([0, 1]), read([1, 2])
    with pytest.raises(RuntimeError, match="open the data twice"):
        next(first)
    assert list(second) == [11, 12]


def test_a_batch_split_over_ranks_is_the_batch_of_one_process(pictures):
    def make(rank, world_size):
        return open_images(pictures, size=16, batch_size=12, train=True, rank=rank, world_size=world_size)

    whole = make(0, 1)
    ranks = [make(rank, 3) for rank in range(3)]
    steps = zip(*(r.epoch(4) for r in ranks), whole.epoch(4), strict=True)
    for step, (*parts, (images, labels)) in enumerate(steps):
        assert torch.equal(torch.cat([images for images, _ in parts]), images)
        assert torch.equal(torch.cat([labels for _, labels in parts]), labels)
        for rank, (_, y) in zip(ranks, parts, strict=True):
            assert torch.equal(labels[rank.order.rows(step)], y)


def test_crops_change_from_epoch_to_epoch_and_with_the_seed(pictures):
    def first(epoch, seed, shuffle="fixed"):
        batches = open_images(pictures, size=16, batch_size=14, train=True, seed=seed, shuffle=shuffle)
        return next(batches.epoch(epoch))

    (a, la), (b, lb) = first(0, 0), first(1, 0)
    assert torch.equal(la, lb)  # the fixed order is the same in every epoch
    assert not torch.equal(a, b)
    assert not torch.equal(first(0, 1)[1], la)


def test_evaluation_is_the_same_every_time_and_in_stored_order(sets):
    batches = open_images(sets["folder"], "val", size=4, batch_size=4, train=False)
    assert len(batches) == 3
    epochs = [list(batches.epoch(e)) for e in (0, 9)]
    assert_same(*epochs)
    assert [k for images, _ in epochs[0] for k in contents(images)] == list(range(11))


def test_a_rank_without_examples_gets_an_empty_batch(sets):
    batches = open_images(sets["folder"], "val", size=4, batch_size=5, train=False, rank=1, world_size=2)
    *_, (images, labels) = batches.epoch(0)
    assert images.shape == (0, 3, 4, 4)
    assert labels.shape == (0,)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("cache", ["none", "device"])
def test_form_of_the_batches(pictures, cache):
    batches = open_images(pictures, size=16, batch_size=5, train=True, cache=cache)
    images, labels = next(batches.epoch(0))
    assert images.shape == (5, 3, 16, 16)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64
    assert batches.classes == ("class0", "class1", "class2")
    assert batches.num_examples == 14


def test_cached_crops_are_those_without_a_cache(tmp_path):
    """Images that already have the cache's size are resampled only once, so only rounding differs."""
    for k in range(8):
        (tmp_path / "train" / "a").mkdir(parents=True, exist_ok=True)
        smooth(32, 32, seed=k).save(tmp_path / "train" / "a" / f"{k}.png")
    for train in (True, False):
        plain, cached = (
            open_images(tmp_path, size=32, batch_size=8, train=train, cache=cache) for cache in ("none", "device")
        )
        for (a, _), (b, _) in zip(plain.epoch(2), cached.epoch(2), strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=2, rtol=0)


def test_cached_crops_of_larger_images_are_close(pictures):
    """With a cache, images are stretched to squares and resampled twice, but the crops are nearly the same."""
    plain, cached = (open_images(pictures, size=24, batch_size=14, train=False, cache=c) for c in ("none", "device"))
    (a, _), (b, _) = next(plain.epoch(0)), next(cached.epoch(0))
    assert (a.float() - b.float()).abs().mean() < 4
    shuffled = b[torch.randperm(14)]
    assert (a.float() - shuffled.float()).abs().mean() > 20


@pytest.fixture
def damaged(tmp_path):
    folder = image_folder(tmp_path / "set", SIZES)
    files = sorted((folder / "train").rglob("*.png"))
    files[3].write_bytes(b"not an image")
    files[9].write_bytes(files[9].read_bytes()[:50])
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", ["none", "device"])
@pytest.mark.parametrize("layout", ["folder", "shards"])
def test_corrupt_files_are_skipped_counted_and_listed(damaged, layout, cache, workers, tmp_path):
    path = damaged if layout == "folder" else sharded(damaged, tmp_path / "shards")
    batches = open_images(path, size=4, batch_size=8, train=True, cache=cache, workers=workers)
    for epoch in range(2):
        seen = [k for images, labels in batches.epoch(epoch) for k in contents(images)]
        assert sorted(seen) == sorted(set(range(len(SIZES))) - {3, 9})
        corrupt = {file.example for file in batches.corrupt}
        assert len(corrupt) == len(batches.corrupt) == 2
        assert corrupt <= set(range(batches.num_examples))
    assert any("cannot identify image file" in file.reason for file in batches.corrupt)
    assert all(".png" in file.name for file in batches.corrupt)
    assert batches.num_examples == len(SIZES)


@pytest.mark.parametrize("cache", ["none", "device"])
def test_positions_in_a_step_count_corrupt_files_on_all_ranks(damaged, cache):
    def numbered(world_size):
        options = {"size": 4, "batch_size": 8, "train": True, "cache": cache, "world_size": world_size}
        ranks = [open_images(damaged, rank=rank, **options).numbered_epoch(0) for rank in range(world_size)]
        for parts in zip(*ranks, strict=True):
            yield {p: k for images, _, rows in parts for p, k in zip(rows.tolist(), contents(images), strict=True)}

    whole = list(numbered(1))
    assert [len(step) for step in whole] != [1 + max(step) for step in whole]  # there are gaps at the corrupt files
    assert whole == list(numbered(2))


@pytest.mark.parametrize("cache", ["none", "device"])
def test_too_many_corrupt_files_stop_with_their_names(damaged, cache):
    with pytest.raises(
        TooManyCorruptError, match=r"2 files could not be read, more than max_corrupt=1: .* the first ones: .*png.*Unid"
    ):
        list(open_images(damaged, size=4, batch_size=8, train=True, cache=cache, max_corrupt=1).epoch(0))


def test_a_training_batch_that_loses_all_but_one_image_stops(tmp_path):
    folder = image_folder(tmp_path, SIZES[:4])
    for file in sorted((folder / "train").rglob("*.png"))[1:]:
        file.write_bytes(b"")
    with pytest.raises(TooManyCorruptError, match=r"step 0 of epoch 0 has 1 readable image\(s\), too few"):
        list(open_images(folder, size=4, batch_size=4, train=True).epoch(0))


def test_a_file_that_vanishes_is_listed(tmp_path):
    folder = image_folder(tmp_path, SIZES)
    batches = open_images(folder, size=4, batch_size=8, train=False)
    sorted((folder / "train").rglob("*.png"))[0].unlink()
    assert sum(len(labels) for _, labels in batches.epoch(0)) == len(SIZES) - 1
    assert "No such file" in batches.corrupt[0].reason


def test_start_outside_of_the_epoch(sets):
    batches = open_images(sets["folder"], size=4, batch_size=8, train=True)
    assert list(batches.epoch(0, len(batches))) == []
    with pytest.raises(ValueError, match="start=4 is out of range: an epoch has 3 steps"):
        next(batches.epoch(0, 4))


def test_where_the_images_are(sets):
    options = {"size": 4, "batch_size": 8, "train": True}
    images, labels = next(open_images(sets["folder"], device="meta", **options).epoch(0))
    assert images.is_meta
    assert labels.is_meta
    with pytest.raises(ValueError, match="cache='gpu' is unknown: choose 'none' or 'device'"):
        open_images(sets["folder"], cache="gpu", **options)


def test_paths_that_are_neither_layout(tmp_path, sets):
    options = {"size": 4, "batch_size": 8, "train": True}
    with pytest.raises(FileNotFoundError, match=r"is not a folder: give one with train/CLASS/\*.jpg"):
        open_images(tmp_path / "nothing", **options)
    (tmp_path / "pictures").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has neither train/CLASS/\*.jpg nor train-\*.tar; it holds: pictures"):
        open_images(tmp_path, **options)
    (tmp_path / "train" / "ant").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=rf"it holds: ant; did you mean {re.escape(str(tmp_path))}\?"):
        open_images(tmp_path / "train", **options)
    with pytest.raises(FileNotFoundError, match=r"has no images \(.*\) in its class folders$"):
        open_images(tmp_path, **options)
    (tmp_path / "train" / "loose.png").touch()
    with pytest.raises(FileNotFoundError, match="but has 1 outside of them: move them into a folder for each class"):
        open_images(tmp_path, **options)
    (tmp_path / "train-0.tar").touch()
    with pytest.raises(FileNotFoundError, match="has both train/ and train"):
        open_images(tmp_path, **options)
    with pytest.raises(FileNotFoundError, match="neither test/CLASS"):
        open_images(sets["folder"], "test", **options)


def test_splits_of_a_folder_agree_on_the_classes(tmp_path):
    image_folder(tmp_path, SIZES[:6])
    image_folder(tmp_path, SIZES[:4], split="val", classes=("bee", "cow"))
    val = open_images(tmp_path, "val", size=4, batch_size=4, train=False)
    assert val.classes == ("ant", "bee", "cow")
    assert next(val.epoch(0))[1].tolist() == [1, 1, 2, 2]
    (tmp_path / "val" / "yak").mkdir()
    with pytest.raises(ValueError, match=r"has classes that .*train lacks \(yak\)"):
        open_images(tmp_path, "val", size=4, batch_size=4, train=False)


def test_words_are_exported():
    assert bn.data.open_images is open_images
    assert np.isscalar(bn.data.seed_at(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_the_gpu_are_those_of_the_cpu(pictures, workers):
    options = {"size": 16, "batch_size": 4, "train": True, "workers": workers}
    here, there = (open_images(pictures, device=device, **options) for device in ("cpu", "cuda"))
    for _ in range(3):
        for (a, la), (b, lb) in zip(here.epoch(1), there.epoch(1), strict=True):
            assert b.is_cuda
            assert lb.is_cuda
            torch.cuda._sleep(1_000_000)
            assert torch.equal(a, b.cpu())
            assert torch.equal(la, lb.cpu())


@pytest.mark.gpu
def test_cached_batches_on_the_gpu_are_those_of_the_cpu(pictures):
    options = {"size": 16, "batch_size": 4, "train": True, "cache": "device"}
    here, there = (open_images(pictures, device=device, **options) for device in ("cpu", "cuda"))
    for (a, la), (b, lb) in zip(here.epoch(1), there.epoch(1), strict=True):
        assert torch.equal(la, lb.cpu())
        torch.testing.assert_close(a.float(), b.cpu().float(), atol=1, rtol=0)


@pytest.mark.gpu
def test_a_set_that_does_not_fit_on_the_gpu_says_so(pictures, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    with pytest.raises(ValueError, match="use cache='none'"):
        open_images(pictures, size=16, batch_size=4, train=True, cache="device", device="cuda")


STOPPED = """
import os, signal, subprocess, sys
from batchnorm.data import open_images

asked = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(number))
batches = open_images(sys.argv[1], size=4, batch_size=4, train=True, workers=2)
count = 0
for images, labels in batches.epoch(0):
    if count == 4:  # the second batch: both workers have started
        # Send the signals from other processes, as a terminal or a batch system would.
        subprocess.run(["kill", "-INT", "--", f"-{os.getpgid(0)}"], check=False)
        subprocess.run(["setsid", "kill", "-TERM", "--", f"-{os.getpgid(0)}"], check=False)
    count += len(labels)
assert sorted(asked) == [signal.SIGINT, signal.SIGTERM]
print(count)
"""


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid")
def test_workers_outlive_the_signals_that_ask_the_parent_to_stop(sets):
    command = [sys.executable, "-c", STOPPED, str(sets["folder"])]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.stdout, done.stderr) == (f"{len(SIZES)}\n", "")


STARTING = """
import os, signal, sys
from batchnorm.data import open_images

def signals():
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)

batches = open_images(sys.argv[1], size=4, batch_size=4, train=True, workers=2)
os.register_at_fork(after_in_child=signals)
print(sum(len(labels) for images, labels in batches.epoch(0)))
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="needs sigwaitinfo")
def test_workers_outlive_signals_that_come_while_they_start(sets):
    command = [sys.executable, "-c", STARTING, str(sets["folder"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{len(SIZES)}\n", "")


def test_workers_end_with_their_batches(sets):
    batches = open_images(sets["folder"], size=4, batch_size=4, train=True, workers=2)
    next(batches.epoch(0))
    workers = set(multiprocessing.active_children())
    assert len(workers) >= 2
    del batches
    for worker in workers:
        worker.join(600)
        assert not worker.is_alive()


@pytest.mark.parametrize("cache", ["none", "device"])
def test_training_images_as_evaluation_sees_them(pictures, cache):
    training = open_images(pictures, size=8, batch_size=5, train=True, cache=cache)
    expected = open_images(pictures, size=8, batch_size=4, train=False, cache=cache)
    assert_same(training.centered(4).epoch(0), expected.epoch(0))


@pytest.mark.parametrize("layout", ["folder", "shards"])
def test_decoded_images_are_kept_for_the_next_time(layout, tmp_path):
    data = image_folder(tmp_path / "data", SIZES)
    (data / "train" / "class0" / "broken.jpg").parent.mkdir(exist_ok=True)
    (data / "train" / "class0" / "broken.jpg").write_bytes(b"no image")
    data = sharded(data, tmp_path / "shards", per_shard=7) if layout == "shards" else data
    options = {"size": 4, "batch_size": 5, "train": True, "cache": "device", "decoded": tmp_path / "decoded"}
    first, second = (open_images(data, **options) for _ in range(2))
    (file,) = options["decoded"].iterdir()
    written = file.stat().st_mtime_ns
    assert first.corrupt == second.corrupt
    assert len(second.corrupt) == 1
    assert_same(first.epoch(1), second.epoch(1))
    assert_same(second.epoch(0), open_images(data, **{**options, "decoded": None}).epoch(0))
    changed = next(path for path in sorted(data.rglob("*")) if path.suffix in (".tar", ".jpg", ".png", ".webp"))
    os.utime(changed, (1, 1))  # as if the file had changed
    open_images(data, **options)
    assert len(list(options["decoded"].iterdir())) == 2
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 0}, "size=0: must be 1 or more"),
        ({"crop_area": (0.5, 0.1)}, r"crop_area=\(0.5, 0.1\): must be two shares"),
        ({"crop_area": (2, 3)}, r"crop_area=\(2, 3\): must be two shares"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, wrong, says):
    folder = image_folder(tmp_path, [(40, 40)] * 6)
    with pytest.raises(ValueError, match=says):
        open_images(folder, **{"size": 32, "batch_size": 2, "train": True, **wrong})
