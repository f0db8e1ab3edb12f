"""Words of a command line as values: numbers of workers, arguments of a function."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from chorusline.collectives.contract.argument_kinds import MOST_RANKS
from chorusline.collectives.contract.deadlines import checked_seconds


class WrongUsage(Exception):
    """The command line is wrong; the text is a sentence."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: `; did you mean 'status'?`, or empty."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest command or flag where it does not know one."""

    def error(self, message: str) -> NoReturn:
        flags = set(self._option_string_actions)
        commands: set[str] = set()
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                commands |= set(action.choices)
                # A flag that a command does not know comes back to this parser.
                for command in action.choices.values():
                    flags |= set(command._option_string_actions)
        for word in re.findall(r"--[\w-]+|'[\w-]+'", message):
            if word.startswith("--") and word not in flags:
                super().error(message + did_you_mean(word, flags))
            if word.startswith("'") and commands and word.strip("'") not in commands:
                super().error(message + did_you_mean(word.strip("'"), commands))
        super().error(message)


def workers(text: str) -> int | tuple[int, int]:
    """The value of `4`, or of `2..8`, which means up to 8 workers, but at least 2."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of workers; write 4, or 2..8 for as many as fit in between"
        )
    fewest = int(found[1])
    most = int(found[2]) if found[2] else fewest
    if fewest < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too few; at least 1 worker is needed")
    if most < fewest:
        raise argparse.ArgumentTypeError(f"{text!r} is not ascending; write {most}..{fewest}")
    if most > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is too many; write at most {MOST_RANKS}")
    return (fewest, most) if found[2] else fewest


def count(text: str) -> int:
    """The value of `4`; at least 1."""
    if not re.fullmatch(r"\d+", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count_or_zero(text: str) -> int:
    """The value of `3`; 0 means none."""
    if not re.fullmatch(r"\d+", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write 3, or 0")
    return int(text)


def seconds(text: str) -> float:
    """The value of `0.5`; above 0, and at most a year."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; write 60, or 0.5"
        ) from None
    try:
        return checked_seconds(number, "the number of seconds")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def detached_name(text: str) -> str:
    """The text, if a detached session can have that name."""
    from ..session.detached.status import check_attachable  # Not above: `--help` answers at once.

    try:
        check_attachable(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def variable(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair; the value may be empty, and may contain `=`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a variable with its value; write NAME=VALUE"
        )
    return name, value


def script_and_function(text: str) -> tuple[Path, str | None]:
    """The two parts of `train.py:main`; None if no function is named."""
    if Path(text).exists():
        return Path(text), None  # A file's name may contain a colon.
    script, colon, function = text.rpartition(":")
    return (Path(script), function) if colon else (Path(text), None)


def names_function(texts: Sequence[str]) -> bool:
    return any(script_and_function(text)[1] is not None for text in texts)


_OF_DEFAULTS = (str, int, float, bool)


def _hints(
    function: Callable[..., object], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Types of parameters, by name; without those that say nothing."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():

        def alone() -> None: ...

        alone.__annotations__ = {name: parameter.annotation}
        # One that only type checkers can read leaves the others theirs.
        with contextlib.suppress(NameError, TypeError, AttributeError):
            found |= typing.get_type_hints(alone, names)
    return {
        name: hint
        for name, hint in found.items()
        if hint not in (Any, object, inspect.Parameter.empty)
    }


def keywords(words: Sequence[str], function: Callable[..., object]) -> dict[str, Any]:
    """`--learning-rate 0.1 --name=first --fast` as keyword arguments of `function`, whose first
    parameter is the context.

    A value gets the type of its parameter: that of the annotation (numbers, Path, Literal, Enum,
    lists, dataclasses, and whatever else pydantic knows), or of a default that is a str, int, float
    or bool. Where neither says a type, a value is read as a Python literal, or stays a text.

    Raises ValueError, naming the function's parameters, for words that do not fit.
    """
    try:
        parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    except ValueError:
        parameters = {}  # Of functions of C, Python does not know them.
    hints = _hints(function, parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given: dict[str, Any] = {}
    left = list(words)
    while left:
        flag = left.pop(0)
        if not re.match(r"--[A-Za-z_]", flag):
            raise ValueError(
                f"{flag!r} is not an argument of a function; write --name value, as in --lr 0.1"
            )
        name, is_joined, value = flag[2:].partition("=")
        name = name.replace("-", "_")
        if name not in parameters and not takes_any:
            takes = ", ".join(f"--{one.replace('_', '-')}" for one in parameters) or "no arguments"
            raise ValueError(f"the function has no parameter {name!r}; it takes {takes}")
        if name in given:
            raise ValueError(f"--{name} is given twice")
        if not is_joined:
            # A flag before another one, or at the end, is a switch. -4 is a value, and no flag.
            has_value = bool(left) and not re.match(r"--[A-Za-z_]", left[0])
            value = left.pop(0) if has_value else "True"
        given[name] = _converted(name, value, parameters.get(name), hints.get(name))
    missing = [
        f"--{name.replace('_', '-')}"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in given
    ]
    if missing:
        raise ValueError(f"the function needs {', '.join(missing)}; write them after --")
    return given


def _converted(name: str, text: str, parameter: inspect.Parameter | None, hint: Any) -> Any:
    """The value of a word. hint: the type of the parameter; None if it says none."""
    if hint is None and parameter is not None and type(parameter.default) in _OF_DEFAULTS:
        hint = type(parameter.default)
    try:
        literal = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        literal = {"true": True, "false": False}.get(text.lower(), text)
    if hint is None:
        return literal
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    flag, takes = f"--{name.replace('_', '-')}", getattr(hint, "__name__", str(hint))
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
    except PydanticUserError:
        raise ValueError(
            f"{flag} takes {takes}, which no word of a command line can be; annotate it as str"
        ) from None
    try:
        return adapter.validate_strings(text)  # numbers, paths, members of a Literal or an Enum
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
    try:
        # A plain number was a text of the wrong kind; a container or None is one here only.
        if not isinstance(literal, str | int | float):
            return adapter.validate_python(literal)
    except ValidationError as error:
        first = error.errors()[0]
        at = "".join(f" at {where!r}" for where in first["loc"])
        problem = f"{first['msg']}{at}"
    raise ValueError(f"{flag} takes {takes}, got {text!r}: {problem}")
