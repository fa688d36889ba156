import json
import os
import shutil
import zipfile

import pytest
import torch
from full_disk import no_room

from batchnorm.train import checkpoint
from batchnorm.train.checkpoint import CheckpointError, load, load_latest, save

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7)}
STATE = {"optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}}, "metrics": 12, "note": "x", "list": [1, 2]}


def test_round_trip(tmp_path):
    save(tmp_path / "checkpoints", 5, MODEL, STATE)
    found = load_latest(tmp_path / "checkpoints")
    assert found.step == 5
    torch.testing.assert_close(found.model, MODEL, rtol=0, atol=0)
    assert found.state.pop("optimizer")["state"][0]["momentum_buffer"].tolist() == [1.0, 1.0, 1.0]
    assert found.state == {"metrics": 12, "note": "x", "list": [1, 2]}


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path):
    base = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    save(tmp_path, 1, {"a": base, "b": base, "c": base[:, 1]}, {})
    model = load_latest(tmp_path).model
    assert torch.equal(model["a"], base)
    assert torch.equal(model["c"], base[:, 1])


def test_no_checkpoint_is_no_error(tmp_path):
    assert load_latest(tmp_path / "nowhere") is None


def test_a_replaced_checkpoint_is_never_incomplete(tmp_path, monkeypatch):
    final, removed, move = save(tmp_path, 1, MODEL, {"note": "old"}), [], os.rename
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, **_: removed.append(path))
    monkeypatch.setattr(
        checkpoint.os, "rename", lambda old, new: 1 / 0 if old.name[:8] == ".writing" else move(old, new)
    )
    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 1, MODEL, {"note": "new"})
    assert load(final).state == {"note": "old"}
    monkeypatch.undo()
    save(tmp_path, 1, MODEL, {"note": "new"})
    assert load(final).state == {"note": "new"}
    assert final not in removed
    assert list(tmp_path.iterdir()) == [final]


def test_what_a_killed_process_left_is_restored_or_removed(tmp_path):
    final = save(tmp_path, 1, MODEL, {"note": "old"})
    os.rename(final, tmp_path / ".replaced-000000001")  # killed before the new checkpoint had its name
    assert checkpoint.newest_step(tmp_path) == 1
    assert load_latest(tmp_path).state == {"note": "old"}
    (tmp_path / ".writing-000000001").mkdir()
    (tmp_path / "step-000000002").mkdir()
    shutil.copytree(tmp_path / ".replaced-000000001", tmp_path / ".replaced-000000002")
    later = save(tmp_path, 3, MODEL, {})
    assert load(later).step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000002", "step-000000003"]
    final = save(tmp_path / "final", 1, MODEL, {"note": "old"})
    os.rename(final, final.parent / ".replaced-000000001")
    save(final.parent, 2, MODEL, {})
    assert load(final).state == {"note": "old"}


def test_two_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, MODEL, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]


def test_those_of_later_steps_are_removed(tmp_path):
    for step in (7, 8, 3):  # the run was started over
        save(tmp_path, step, MODEL, STATE)
    assert load_latest(tmp_path).step == 3
    save(tmp_path, 4, MODEL, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]


def truncate(path):
    os.truncate(path / "model.safetensors", 40)


def alter(path):
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def lose(path):
    (path / "state.pt").unlink()


def manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


def replaced(path, write):
    """Replace a checkpoint's state.pt, and update the manifest to match."""
    write(path / "state.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.pt"] = checkpoint._fingerprint(path / "state.pt")
    (path / "manifest.json").write_text(json.dumps(manifest))


def compress(path):
    def write(state):
        with zipfile.ZipFile(state) as file:
            entries = {name: file.read(name) for name in file.namelist()}
        with zipfile.ZipFile(state, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in entries.items():
                file.writestr(name, content)

    replaced(path, write)


def no_dict(path):
    replaced(path, lambda state: torch.save([1, 2], state))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, r"model\.safetensors has 40 bytes instead of \d+"),
        (alter, r"state\.pt is damaged or was modified"),
        (lose, r"state\.pt is missing"),
        (manifest(""), "no readable manifest"),
        (manifest("[1]"), "no readable manifest"),
        (manifest('{"format": "someone else\'s", "step": 2, "files": {}}'), 'its format is "someone else\'s"'),
        (manifest(f'{{"format": "{checkpoint.FORMAT}", "step": 2, "files": {{"state.pt": 3}}}}'), "has no valid step"),
        (manifest(f'{{"format": "{checkpoint.FORMAT}", "step": Infinity, "files": {{}}}}'), "has no valid step"),
        (compress, "is compressed"),
        (no_dict, "does not hold a dict"),
    ],
)
def test_damaged_checkpoints_are_passed_over(tmp_path, damage, says):
    save(tmp_path, 1, MODEL, STATE)
    newest = save(tmp_path, 2, MODEL, STATE)
    damage(newest)
    with pytest.raises(CheckpointError, match=says):
        load(newest)
    found = load_latest(tmp_path)
    assert found.step == 1
    assert len(found.passed_over) == 1
    # The damaged checkpoint is overwritten when the run reaches that step again.
    save(tmp_path, 2, MODEL, STATE)
    assert load_latest(tmp_path).step == 2


def test_all_damaged(tmp_path):
    for step in (1, 2):
        truncate(save(tmp_path, step, MODEL, STATE))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*step-000000002.*step-000000001"):
        load_latest(tmp_path)


def test_code_in_a_state_file_does_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    path = save(tmp_path, 1, MODEL, STATE)
    replaced(path, lambda state: torch.save(Harmful(), state))
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        load(path)
    assert not (tmp_path / "harm").exists()


def test_a_write_that_fails_leaves_the_last_good_one(tmp_path, monkeypatch):
    save(tmp_path, 1, MODEL, STATE)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, MODEL, STATE)
    monkeypatch.undo()
    assert load_latest(tmp_path).step == 1
    save(tmp_path, 2, MODEL, STATE)
    assert load_latest(tmp_path).step == 2


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(tmp_path):
    save(tmp_path, 1, MODEL, STATE)
    for size in (50, 500):  # too small for the weights; too small for state.pt
        with no_room(size), pytest.raises(OSError, match="too large") as error:
            save(tmp_path, 2, MODEL, STATE)
        assert error.value.filename.endswith("model.safetensors" if size == 50 else "state.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert load_latest(tmp_path).step == 1
