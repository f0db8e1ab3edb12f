"""PyTorch's own tests: what Gloo passes, ours passes."""

import pytest

from tests.harness.programs import figures_of


def passed(figures):
    return {name for name, outcome in figures["outcomes"].items() if outcome == "passed"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_what_gloo_passes_of_torchs_suite_ours_passes(ranks):
    figures = figures_of("compatibility.torch_suite", "--ranks", ranks, timeout_s=1500)
    gloos = passed(figures[f"gloo/{ranks}"])
    assert len(gloos) > 80
    assert gloos - passed(figures[f"ours/{ranks}"]) == set()


FILE = """
import unittest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Small(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def start(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
    def test_passes(self):
        self.start()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
    def test_fails(self):
        self.start()
        assert self.rank == 0
    def test_hangs(self):
        self.start()
        if self.rank == 0:
            while True:
                pass
    def test_skips(self):
        raise unittest.SkipTest("because")

class Plain(unittest.TestCase):
    def test_dies(self):
        import os
        os.abort()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_of_tests_runs_on_gloo_and_on_ours_and_ends_whatever_its_tests_do(tmp_path):
    (tmp_path / "test_small.py").write_text(FILE)
    source = ["--source", str(tmp_path), "--files", "test_*.py", "--limit", "5"]
    figures = figures_of("compatibility.torch_suite", *source, timeout_s=300)
    for backend, is_ours in (("gloo", False), ("ours", True)):
        ended = figures[backend]["test_small.py"]
        assert ended["Small.test_passes"] == {"outcome": "passed", "reached": 2 * is_ours}
        assert ended["Small.test_skips"]["outcome"] == "skipped"
        assert "AssertionError" in ended["Small.test_fails"]["outcome"]
        assert ended["Small.test_hangs"]["outcome"].startswith("Traceback")
        assert "the process of the test died" in ended["Plain.test_dies"]["outcome"]
