"""examples/stdlib_gpt.py: its corpus, its records, what it refuses, and a whole run of it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from matplotlib.image import imread

from chorusline.actors.messages.messages import Report
from tests import ROOT
from tests.harness.forked_workers import python

EXAMPLE = ROOT / "examples" / "stdlib_gpt.py"
TINY = ["--preset", "tiny", "--files", "9", "--block", "32", "--batch-size", "32"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("stdlib_gpt", EXAMPLE)
    module = sys.modules["stdlib_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["stdlib_gpt"]


@pytest.fixture
def arguments(example, monkeypatch, tmp_path):
    def parse(*args):
        monkeypatch.setattr(sys, "argv", ["stdlib_gpt.py", "--out", str(tmp_path), *args])
        return example.from_command_line()

    return parse


def test_blocks_overlap_by_the_byte_that_is_only_foretold_and_stay_in_one_file(example):
    corpus = example.Corpus([b"abcdefgh", b"", b"hi", b"jklm"], block=3)
    blocks = [bytes(corpus[sample].tolist()) for sample in range(len(corpus))]
    assert blocks == [b"abcd", b"defg", b"jklm"]
    assert len(set(corpus.file_of[:2])) == 1
    assert corpus.file_of[2] not in corpus.file_of[:2]


def test_library_files_are_sources_in_the_same_order_every_time(example):
    files = example.library_files(100)
    assert files == example.library_files(1000)[:100]
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in files)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_default_corpus_gives_ranks_really_different_numbers_of_batches(
    example, arguments, num_ranks
):
    _, plan, corpus = arguments()
    dealt = example.schedule(corpus, plan, num_ranks, epoch=0)
    assert max(map(len, dealt)) >= 1.1 * min(map(len, dealt))
    samples = sorted(sample for batches in dealt for batch in batches for sample in batch)
    assert samples == list(range(len(corpus)))


def test_model_foretells_only_from_what_came_before(example):
    torch.manual_seed(0)
    model = example.GPT(example.PRESETS["tiny"])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # Zeroes would hide what looks ahead.
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12] += 1
    differs = (model.logits(tokens) != model.logits(changed)).any(dim=2)[0]
    assert differs.tolist() == [False] * 12 + [True] * 8


def test_metrics_tell_a_rank_that_is_out_of_data_from_one_that_is_lost(example):
    def report(rank, step, left, epoch=0):
        values = {"loss": 1.0 + rank, "tokens": 5, "epoch": epoch, "batches_left": left}
        return Report(rank, 0, 1.0, values, taken=step)

    of_rank_0 = [report(0, 1, 0), report(0, 3, 1, epoch=1), report(0, 4, 0, epoch=1)]
    of_rank_1 = [report(1, 1, 1), report(1, 2, 0), report(1, 3, 5, epoch=1)]
    records = example.metrics([*of_rank_0, *of_rank_1], num_ranks=2)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["epoch"] for record in records] == [0, 0, 1, 1]
    assert [record["out_of_data"] for record in records] == [[], [0], [], []]
    assert [record["lost"] for record in records] == [[], [], [], [1]]
    assert [record["loss"] for record in records] == [1.5, 2.0, 1.5, 1.0]
    assert records[1]["loss_by_rank"] == [None, 2.0]
    assert example.num_repeated([*of_rank_0, *of_rank_1]) == 0
    assert example.num_repeated([*of_rank_0, report(0, 3, 1)]) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_cut_corpus_has_no_longer_epoch_and_something_of_most_files(
    example, arguments, num_ranks
):
    _, plan, whole = arguments("--epochs", "3")
    _, _, corpus = arguments("--epochs", "3", "--steps", "40", "--workers", str(num_ranks))
    epochs = [example.schedule(corpus, plan, num_ranks, epoch) for epoch in range(3)]
    assert 30 < max(len(own) for epoch in epochs for own in epoch) <= 40
    assert len(set(corpus.file_of)) > 0.7 * len(set(whole.file_of))
    blocks = [bytes(corpus[sample].tolist()) for sample in range(len(corpus))]
    assert set(blocks) < {bytes(whole[sample].tolist()) for sample in range(len(whole))}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--workers", "0"], "argument --workers: needs a whole number from 1, not '0'"),
        (["--batch-size", "many"], "argument --batch-size: needs a whole number from 1"),
        (["--lr", "-1"], "argument --lr: needs a number above 0, not '-1'"),
        (["--lr", "nan"], "argument --lr: needs a number above 0, not 'nan'"),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--block", "99999999"], "argument --block: none of the files is longer than 99999999"),
        (["--out", __file__], "argument --out: cannot make the folder"),
        (["--seed", "-1"], "argument --seed: needs a whole number from 0"),
        (["--strike", "--workers", "1"], "argument --strike: needs --workers 2 or more"),
    ],
)
def test_nonsense_arguments_are_named_before_ray_starts(arguments, capsys, args, sentence):
    was_initialized = ray.is_initialized()
    with pytest.raises(SystemExit) as stop:
        arguments(*args)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
    assert ray.is_initialized() == was_initialized


def test_library_without_sources_is_told_by_the_argument(arguments, example, monkeypatch, capsys):
    monkeypatch.setattr(example, "library_files", lambda limit: [])
    with pytest.raises(SystemExit):
        arguments()
    assert "argument --files: no source files in /" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_run_writes_its_files_and_agrees_with_one_process(tmp_path, on_cluster):
    flags = ("--epochs", "2", "--steps", "30", "--verify")
    done = trained(*flags, folder=tmp_path, environment=on_cluster)
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    assert any(record["out_of_data"] for record in records), (
        "no rank ran out of data before the other"
    )
    picture = imread(tmp_path / "out/loss.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05, "the plot is blank"
    in_epoch = sum(record["epoch"] == 1 for record in records)
    assert in_epoch <= 30
    assert f"epoch 2/2  step {in_epoch}/{in_epoch}  loss" in done.stderr
    assert "is out of data; the others finish the epoch" in done.stderr
    assert "sample:\ndef " in done.stdout
    difference = re.search(r"one process .* largest difference ([^,]+),", done.stdout)
    assert float(difference[1]) < 1e-5


def test_a_run_that_strikes_itself_repeats_no_step_and_loses_no_sample(tmp_path, on_cluster):
    done = trained("--strike", folder=tmp_path, environment=on_cluster)
    # Samples are not counted where the new worker comes in at the last step of all.
    assert re.search(r"\n0 steps repeated(, 0 of \d{3,} samples lost)?\n", done.stdout), done.stdout
    (pid,) = re.findall(r"in another terminal: kill -9 (\d+)\n", done.stdout)
    assert f"rank 1 (pid {pid}) was killed or crashed. 1 worker continues after" in done.stderr
    assert "A worker died" not in done.stdout + done.stderr, "Ray's ten lines"
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert any(record["lost"] == [1] for record in records)


@pytest.mark.slow
def test_chorusline_run_does_the_same_and_lives_without_matplotlib(tmp_path, on_cluster):
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')"
    )
    chorusline = Path(sys.executable).with_name("chorusline")
    done = start([chorusline, "run", EXAMPLE, *TINY, "--workers", "3"], tmp_path, on_cluster)
    assert "no loss.png, since there is no matplotlib" in done.stdout
    assert (tmp_path / "out/metrics.jsonl").stat().st_size > 0
    assert "rank 2: " in done.stdout


def trained(*flags, folder, environment):
    command, variables = python()
    return start([*command, EXAMPLE, *TINY, *flags], folder, environment | variables)


def start(command, folder, environment):
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
