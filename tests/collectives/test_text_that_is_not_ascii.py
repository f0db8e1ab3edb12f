"""Names of files, groups and errors in any script, also such that the locale could not decode: the
bytes of a file's name are lone surrogates under LANG=C."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import chorusline as cl
from chorusline.collectives.contract.call_site import SITE_BYTES, padded_site
from chorusline.collectives.contract.errors import CollectiveMismatch, PayloadUnreadable
from chorusline.collectives.contract.operation import Kind, OnBehalf
from chorusline.collectives.shared_memory.segment import _started_at
from chorusline.collectives.transports.comparing import (
    _WORDS,
    OperationDescription,
    _packed,
    _unpacked,
)
from tests.harness.reused_ranks import another_group

NAMES = {
    "latin": "entraîner",
    "long": "日本語" * 50,
    "cut in the middle of a letter": "a" + "é" * 60,
    "outside of the basic plane": "🚂" * 30,
    "undecodable": b"entra\xc3\xaener".decode("ascii", "surrogateescape"),
    "undecodable and long": b"\xc3".decode("ascii", "surrogateescape") * 300,
}
EVERY_NAME = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


@EVERY_NAME
def test_a_call_site_fits_its_place_and_keeps_its_line(name: str) -> None:
    code = compile("pass", f"/folder/{name}.py", "exec")
    site = padded_site(code, len(code.co_code) - 2)
    assert len(site) == SITE_BYTES
    assert site.rstrip(b"\0").decode(errors="replace").endswith(".py:1")
    comparison = OnBehalf(Kind.COMPARISON, 0, 0, 1, 0, -1, 1.0)
    comparison.whole = f"all_reduce #1, {name}.py:7"
    assert len(comparison.padded_site()) == SITE_BYTES


@EVERY_NAME
@pytest.mark.parametrize("num_dimensions", [0, 2, 200])
def test_a_description_comes_as_it_was_sent_where_it_fits(name: str, num_dimensions: int) -> None:
    sent = OperationDescription(
        "all_reduce #3", [[1] * num_dimensions], "cpu", name, f"{name}.py:7"
    )
    words = _packed(sent)
    assert words.shape == (_WORDS,)
    come = _unpacked(words)
    assert come.operation == sent.operation
    assert name.startswith(come.group) and len(come.group) >= min(len(name), 50)
    assert sent.site.endswith(come.site) and come.site.endswith(".py:7")


class Unreadable:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return refuse, (self.name.encode("utf-8", "surrogatepass"),)


def refuse(name: bytes) -> None:
    raise TypeError(f"no value for {name.decode('utf-8', 'surrogatepass')}")


def fail(group: cl.Group, name: str) -> list[str]:
    """What each rank is told of an object that cannot be read, of different collectives in a
    function of that file, and of an abort for that reason."""
    told = []
    with another_group(group) as own:
        try:
            own.all_gather_object(Unreadable(name) if own.rank else 0).wait()
        except PayloadUnreadable as error:
            told.append(str(error))
    with another_group(group) as own:
        names: dict[str, Any] = {}
        body = "def differ(group, tensor): group.all_reduce(tensor).wait()"
        exec(compile(body, f"/folder/{name}.py", "exec"), names)
        try:
            names["differ"](own, torch.zeros(1 + own.rank))
        except CollectiveMismatch as error:
            told.append(str(error))
    with another_group(group) as own:
        if own.rank == 0:
            own.abort(f"reason {name}")
        try:
            own.barrier().wait()
        except cl.GroupAborted as error:
            told.append(str(error))
    return told


@EVERY_NAME
def test_errors_reach_all_ranks_with_such_a_text(ranks_of, name):
    for unreadable, differ, aborted in ranks_of(2).run(fail, name):
        assert f"no value for {name}" in unreadable
        assert "all_reduce #" in differ
        assert f"reason {name}" in aborted


def test_a_process_may_have_any_name_and_lives_all_the_same() -> None:
    """Ray names its workers by their functions, and the kernel cuts names anywhere."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes("entraîner".encode()[:6])
        assert _started_at(os.getpid())
    finally:
        name.write_bytes(before)
