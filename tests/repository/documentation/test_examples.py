"""The examples with the model of a library: whole runs, on two ranks with different data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.harness.programs import output_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
"""Each trains for up to a minute on two cores, in a cluster of its own."""


def printed(name: str, *libraries: str) -> str:
    for library in libraries:
        pytest.importorskip(library, reason=f"{library} is not installed")
    return output_of(ROOT / "examples" / name, timeout_s=300)


def accuracy(told: str) -> float:
    found = re.search(r"accuracy (\d\.\d+)", told)
    assert found, told
    return float(found[1])


def numbers(told: str, unit: str) -> list[int]:
    """By rank."""
    return [int(one) for one in re.findall(rf"rank \d: (\d+) {unit}", told)]


def test_a_text_classifier_of_transformers_learns_on_uneven_ranks() -> None:
    told = printed("text_classifier.py", "transformers")
    first, second = numbers(told, "batches")
    assert first != second
    assert accuracy(told) > 0.6  # Of three kinds.


def test_an_image_model_has_the_same_statistics_on_uneven_ranks() -> None:
    told = printed("image_model.py", "matplotlib", "PIL")
    first, second = numbers(told, "batches")
    assert first != second
    assert "statistics equal" in told
    assert accuracy(told) > 0.8  # On a font that it has not seen, of ten letters.


def test_lora_fine_tuning_moves_adapters_only() -> None:
    told = printed("lora_fine_tuning.py", "transformers", "peft")
    values = {
        name: float(value.replace(",", ""))
        for name, value in re.findall(r"^([a-z ]+): ([\d,.]+)$", told, re.MULTILINE)
    }
    assert values["base tensors that moved"] == 0
    assert 0 < values["adapters"] < values["parameters"] / 5
    assert values["loss after"] < values["loss before"]


def test_a_lightning_module_sees_each_sample_once() -> None:
    told = printed("lightning_module.py", "lightning")
    assert numbers(told, "samples") == [20 * 31, 20 * 30]
    assert accuracy(told) > 0.6  # Of five packages.


def test_a_page_names_each_of_them() -> None:
    of = {"stdlib_gpt.py": "Makefile", "tune_sessions.py": "docs/tracking.md"}
    for example in Path(ROOT / "examples").glob("*.py"):
        page = ROOT / of.get(example.name, "docs/bring-your-trainer.md")
        assert f"examples/{example.name}" in page.read_text()
