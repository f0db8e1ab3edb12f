"""Loading a checkpoint runs no code that the checkpoint names, unless the user says that it may."""

from __future__ import annotations

import random
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import chorusline as cl
from chorusline.runtime.commands.command_line import main
from chorusline.runtime.program.function_call import FunctionCall
from tests.references.checkpoint_runs import in_run
from tests.references.script_values import Mode, Options, Point


class Marker:
    """An object of a class of the user, which tells when it is unpickled."""

    num_made = 0

    def __reduce__(self) -> Any:
        return _made, ()


def _made() -> Marker:
    Marker.num_made += 1
    return Marker()


class Holder:
    """Something with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


PLAIN = [
    *(1, 2.5, "text", b"bytes", True, None, (1, [2, {3: 4}]), {5, 6}, torch.float16),
    *(torch.ones(2), torch.Size([3]), numpy.arange(5), numpy.float32(1.5)),
    *(numpy.array(["2026-11-22"], dtype="datetime64[D]"), b"", numpy.zeros((0, 2))),
]


def _save(group: cl.Group, place: Path, value: Any) -> list[str]:
    """Save a model, and an object that holds `value`. Returns the warnings."""

    def body(ctx: cl.Context) -> None:
        ctx.register("model", torch.nn.Linear(2, 2))
        ctx.register("holder", Holder(value))
        ctx.register("random", cl.RandomState())
        for _ in range(2):
            ctx.save().wait()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_run(group, body, cl.CheckpointConfig(place))
    return [str(warning.message) for warning in caught]


def _load(
    group: cl.Group, config: cl.CheckpointConfig, allowed: list[Any]
) -> tuple[Any, int, list[float]]:
    """The value, how many Markers that made, and what the generators draw next."""
    Marker.num_made = 0
    holder = Holder("before")

    def body(ctx: cl.Context) -> list[float]:
        ctx.register("holder", holder)
        ctx.register("random", cl.RandomState())
        return [random.random(), numpy.random.rand(), float(torch.rand(()))]

    drawn: list[float] = []
    with torch.serialization.safe_globals(allowed):
        try:
            drawn = in_run(group, body, config)
        except cl.CheckpointUntrusted as error:
            holder.value = (holder.value, str(error))
    return holder.value, Marker.num_made, drawn


def test_plain_values_and_the_states_of_generators_load_without_a_word(ranks_of, tmp_path):
    assert ranks_of(1).run(_save, tmp_path, PLAIN) == [[]]
    ((value, _, drawn),) = ranks_of(1).run(_load, cl.CheckpointConfig(tmp_path), [])
    assert str(value) == str(PLAIN)
    ((_, _, again),) = ranks_of(1).run(_load, cl.CheckpointConfig(tmp_path), [])
    assert drawn == again != []


def test_other_objects_need_the_users_word_and_are_named_when_they_are_saved(ranks_of, tmp_path):
    ((word,),) = ranks_of(1).run(_save, tmp_path, [Marker()])  # once, of two saves
    made_by = f"{__name__}._made"
    assert word.startswith(f"holder is made of {made_by}: a checkpoint with it loads only with ")
    (folder, _) = sorted(tmp_path.iterdir(), reverse=True)

    config = cl.CheckpointConfig(tmp_path)
    (((before, refusal), num_made, _),) = ranks_of(1).run(_load, config, [])
    assert (before, num_made) == ("before", 0)
    assert refusal.startswith(f"checkpoint {folder}: holder is made of {made_by}, and loading it ")
    assert "pass CheckpointConfig(weights_only=False), or allow these names with torch." in refusal

    (([marker], num_made, _),) = ranks_of(1).run(_load, config, [_made])
    assert isinstance(marker, Marker) and num_made == 1
    trusting = cl.CheckpointConfig(tmp_path, weights_only=False)
    (([marker], num_made, _),) = ranks_of(1).run(_load, trusting, [])
    assert isinstance(marker, Marker) and num_made == 1


@pytest.mark.parametrize("value", [[1, "text"], numpy.zeros(2, dtype=[("a", "O")]), []])
def test_arrays_of_objects_need_the_users_word_too(ranks_of, tmp_path, value):
    """They have no class that the file names."""
    kind = getattr(value, "dtype", "O")
    ((word,),) = ranks_of(1).run(_save, tmp_path, [numpy.array(value, dtype=kind)])
    assert word.startswith("holder is made of numpy.dtypes.ObjectDType: a checkpoint with it loads")
    config = cl.CheckpointConfig(tmp_path)
    (((_, refusal), *_),) = ranks_of(1).run(_load, config, [])
    assert "holder is made of numpy.dtypes.ObjectDType, and loading it would run" in refusal
    ((loaded, *_),) = ranks_of(1).run(_load, config, [numpy.dtypes.ObjectDType])
    assert str(loaded) == str([numpy.array(value, dtype=kind)])


LOOP: list[Any] = [1]
LOOP.append(LOOP)

SCRIPTS: dict[str, tuple[Any, str]] = {
    "an enum": (Mode.EVAL, "holder.value, a Mode, "),
    "a namedtuple": (Point(1, 2), "holder.value, a Point, "),
    "a dataclass": (Options(0.1), "holder.value, an Options, "),
    "a class": (Mode, "holder.value, an EnumType, "),
    "a lock": (threading.Lock(), "holder.value, a lock, "),
    "a lambda": (lambda: 1, "holder.value, a function, "),
    "in a list": ({"deep": [1, (2, Mode.EVAL)]}, "holder.value.deep.1.1, a Mode, "),
    "beside a tensor": ({"a": torch.ones(2), "b": {"c": Point(1, 2)}}, "holder.value.b.c, a Point"),
    "in itself": ({"loop": LOOP, "call": lambda: 0}, "holder.value.call, a function"),
}


def test_a_whole_number_that_torch_does_not_read_is_told_when_it_is_saved(ranks_of, tmp_path):
    longest = (1 << 2039) - 1
    assert ranks_of(1).run(_save, tmp_path / "read", longest) == [[]]
    assert ranks_of(1).run(_load, cl.CheckpointConfig(tmp_path / "read"), [])[0][0] == longest
    ((word,),) = ranks_of(1).run(_save, tmp_path / "not", longest + 1)
    config = cl.CheckpointConfig(tmp_path / "not")
    (((_, refusal), *_),) = ranks_of(1).run(_load, config, [])
    for text in (word, refusal):
        assert "holder is made of an int of more than 2,039 bits (as a text, hex(number)" in text
    trusting = cl.CheckpointConfig(tmp_path / "not", weights_only=False)
    assert ranks_of(1).run(_load, trusting, [])[0][0] == longest + 1


def _save_each(group: cl.Group, place: Path) -> dict[str, str]:
    return {name: _refusal(group, place, value) for name, (value, _) in SCRIPTS.items()}


def _refusal(group: cl.Group, place: Path, value: Any) -> str:
    try:
        _save(group, place, value)
    except TypeError as error:
        return str(error)
    return "saved"


def test_what_only_the_script_has_is_refused_by_its_place_in_the_state(ranks_of, tmp_path):
    (told,) = ranks_of(1).run(_save_each, tmp_path)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    (refusal,) = ranks_of(1).run(_refusal, tmp_path, nested)
    assert refusal.startswith("holder.value is a nested tensor, which a checkpoint cannot hold")
    for name, (_, says) in SCRIPTS.items():
        assert told[name].startswith(says), told[name]
        assert "cannot be saved (" in told[name] and "of an Enum its value" in told[name]


def test_an_export_runs_no_code_and_names_what_it_leaves_out(ranks_of, tmp_path):
    place, file = tmp_path / "place", tmp_path / "plain.pt"
    ranks_of(1).run(_save, place, [Marker()])
    Marker.num_made = 0
    with pytest.warns(UserWarning, match=r"left out of the export.*holder is made of .*_made$"):
        assert main(["checkpoint", "export", str(place), str(file)]) == 0
    assert Marker.num_made == 0
    plain = torch.load(file)  # weights_only=True is the default.
    assert plain.keys() == {"model", "random"}
    torch.nn.Linear(2, 2).load_state_dict(plain["model"])


@pytest.mark.parametrize("origin", ["/../../x", "..", "a/b", "a\0", "x" * 65, 5, None, "'", "é"])
def test_a_checkpoint_names_no_file_of_a_tracker(origin: Any) -> None:
    with pytest.raises(ValueError, match="the place of a rank in the run has another form"):
        FunctionCall.check_progress([{"boundaries": 1, "steps_before": 0, "origin": origin}])
