"""Test ``batchnorm predict`` on a small trained run."""

import csv
import io
import os
import shutil
import sys

import pytest
import torch

from batchnorm.cli import main

CLASSES = ("class0", "class1", "class2")


def test_predict_prints_the_top_classes_and_writes_all(run, finished, data, files, tmp_path, capsys):
    found = run.predict(files)
    words = ["predict", finished, data / "val", files[0], "--top", 2, "--csv", tmp_path / "out.csv", "--device", "cpu"]
    assert main([*map(str, words)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"probabilities: {tmp_path / 'out.csv'}"
    assert [line.partition(": ")[0] for line in lines] == [str(file) for file in [*files, files[0]]]
    (p, q), (best, second) = found.probabilities[0].topk(2)
    assert lines[0] == f"{files[0]}: {CLASSES[best]} {100 * p:.1f}%, {CLASSES[second]} {100 * q:.1f}%"
    header, *rows = csv.reader((tmp_path / "out.csv").read_text().splitlines())
    assert header == ["image", *CLASSES]
    assert [row[0] for row in rows] == [str(file) for file in [*files, files[0]]]
    written = torch.tensor([[float(p) for p in row[1:]] for row in rows])
    torch.testing.assert_close(written[:12], found.probabilities, rtol=1e-5, atol=1e-7)


def test_files_that_cannot_be_read_are_named_at_the_end(finished, tmp_path, files, capsys):
    (tmp_path / "text.png").write_text("no image")
    output = tmp_path / "out.csv"
    words = ["predict", finished, tmp_path / "text.png", *files[:2], "--batch-size", 1, "--csv", output]
    assert main([*map(str, words), "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == [*map(str, files[:2]), "probabilities"]
    first, second = err.splitlines()[-2:]  # on a slow machine, lines of progress come before these
    assert first == "batchnorm predict: 1 of 3 images could not be read:"
    assert second.startswith(f"  {tmp_path}/text.png cannot be read as an image")
    assert [row[0] for row in csv.reader(output.read_text().splitlines())] == ["image", *map(str, files[:2])]
    output.unlink()
    assert main(["predict", str(finished), str(tmp_path / "text.png"), "--csv", str(output), "--device", "cpu"]) == 1
    assert not output.exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 on macOS")
def test_a_file_name_that_is_not_utf_8(finished, tmp_path, files):
    odd, output = tmp_path / os.fsdecode(b"caf\xe9.png"), tmp_path / "out.csv"
    shutil.copy(files[0], odd)
    assert main(["predict", str(finished), str(odd), "--csv", str(output), "--device", "cpu"]) == 0
    assert output.read_bytes().splitlines()[1].startswith(os.fsencode(odd))


def test_a_file_name_that_the_output_cannot_encode(finished, tmp_path, files, monkeypatch):
    odd, output = tmp_path / "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n.png", io.BytesIO()
    shutil.copy(files[0], odd)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main(["predict", str(finished), str(odd), "--device", "cpu"]) == 0
    assert b"/gr\\xfcn.png: class" in output.getvalue()


def test_predict_refuses_what_is_no_image(finished, tmp_path, files, refusal):
    assert f"{finished} has no files that end with .jpg, " in refusal("predict", finished, finished)
    assert "no.png does not exist" in refusal("predict", finished, tmp_path / "no.png")
    assert "give at least one image" in refusal("predict", finished)
    assert f"{files[0]} is a file, not the folder of a run" in refusal("predict", files[0], finished)
    assert "--top=0: must be 1 or more" in refusal("predict", finished, files[0], "--top", 0)
    (tmp_path / "file").touch()
    assert f": {tmp_path}/file" in refusal("predict", finished, files[0], "--csv", tmp_path / "file/out.csv")
