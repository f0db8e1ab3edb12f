"""A program with names and texts in other alphabets, under a locale that has no bytes for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.forked_workers import OFF
from tests.harness.programs import last_line_of

PROGRAM = """
import json, sys
import torch, chorusline as cl

def tränk(ctx, größe, **rest):
    model = cl.DistributedDataParallel(torch.nn.Linear(1, 1))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, replicas=2)
    ctx.register("modèle", model)
    ctx.register("optim", optim)
    for epoch in ctx.epochs(1):
        with cl.Join([model, optim]):
            for batch in ctx.shard(torch.arange(8.0).view(8, 1), 1):
                model(batch).sum().backward()
                optim.step()
                optim.zero_grad()
                ctx.report(verlust_é=1.0, 名前="値")
    sys.stdout.writelines(["\\udcff\\n"])
    print("é 値", größe, "\\udcff.pt")  # As os.listdir has a byte that is no character.
    return größe, rest, ctx.rank

def place(ctx):
    pass

options = {"num_workers": (1, 2), "resources_per_worker": {"CPU": 0.1}}
told = cl.run(tränk, größe="größer é", ключ="значение", **options)
try:
    cl.run(place, checkpoint=cl.CheckpointConfig("FOLDER/plätze"), **options)
except cl.CheckpointPlaceUnusable as error:
    refused = error.detail
print(json.dumps([told, refused]))
"""
OF_C = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_names_and_texts_of_a_run_need_no_locale_that_has_bytes_for_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    # A fork would have the locale of the process that it was forked from.
    started = os.environ | OF_C | {OFF: "1"}
    told, refused = last_line_of(script, timeout_s=280, environment=started, is_forked=False)
    assert told == [["größer é", {"ключ": "значение"}, rank] for rank in range(2)]
    assert "this rank's locale has no bytes for" in refused and "PYTHONUTF8=1" in refused
