"""The configs that ship with the package, and what a run's config holds beyond them: settings, or code of its own.

Scoring takes settings from a run's folder - numbers, words, lists of them - and applies them to the shipped config:
nothing that the folder names is looked up, called or evaluated. A config that differs in more is somebody's program.
"""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from monai.bundle import ConfigParser

from mri_alm.bundle.old_runs import canonical, own_for_scoring, same_part
from mri_alm.bundle.settings import SETTINGS, configs_folder, current_names, is_data
from mri_alm.errors import InputError
from mri_alm.runtime.files import read_json, shown

FORMS = (  # config files that make a run together
    ("prostate_alm",), ("cifar10_binary",), ("cifar10_binary", "cifar100_binary"),
    ("cifar10_longtail",), ("cifar10_longtail", "cifar100_longtail"), ("medmnist3d",),
)  # fmt: skip
_DEVICE = re.compile(r"(\$torch\.device\('(cpu|cuda|cuda:\d{1,3}|mps)'\)|cpu|cuda|cuda:\d{1,3}|mps)")
MOST_VALUES, DEEPEST = 20_000, 40  # the largest shipped config has some 600 values, 8 levels deep
_SHOWN, _LONGEST = 20, 160
_ABSENT = object()


def shipped_config(*names: str) -> dict[str, Any]:
    """One of the shipped configs, or one with its overlays, as MONAI reads it, every part in its place.

    Args:
        names: Such as ``"prostate_alm"``.
    """
    folder = configs_folder()
    config: dict[str, Any] = ConfigParser.load_config_files([str(folder / f"{name}.json") for name in names])
    return cast(dict[str, Any], with_parts(config, folder))


def with_parts(value: Any, folder: Path) -> Any:
    """A config with every macro replaced by what it stands for: a file of the shipped parts, or an entry of one.

    Args:
        value: A config, or a piece of one, as it is read.
        folder: :func:`mri_alm.bundle.settings.configs_folder`.
    """
    if isinstance(value, dict):
        return {key: with_parts(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_parts(inner, folder) for inner in value]
    if not (isinstance(value, str) and value.startswith("%configs/")):
        return value
    path, *entries = value.removeprefix("%configs/").split("::")
    part = read_json(folder / path)
    for entry in entries:
        part = part[entry]
    return with_parts(part, folder)


def differences(config: Mapping[str, Any], shipped: Mapping[str, Any]) -> list[str]:
    """Where a config says more than other values of settings; a line each, empty if it is the shipped one.

    Settings are held against their table. A setting that is absent counts as its default, an old name as the new one,
    and a part in an earlier form as the shipped one where it gives the same results, or where a model of then scores
    with it (:data:`mri_alm.bundle.old_runs.SCORED_WITH`).

    Args:
        config: Of a run, macros resolved, or of a file as it is.
        shipped: What it is compared with.
    """
    check_bounds(config)
    theirs = current_names(config)
    several, known = shipped_config("multi_gpu"), own_for_scoring(theirs)
    lines: list[str] = []
    for name in sorted({*theirs, *shipped}):
        value, own = theirs.get(name), shipped.get(name)
        if name in SETTINGS and name in shipped:
            lines += _setting_problem(name, value, own) if name in theirs else []
        elif name in known or (name == "device" and isinstance(value, str) and _DEVICE.fullmatch(value)):
            continue
        elif name not in shipped and name not in several:  # null too: MONAI reaches inside with a::b, and + merges
            lines.append(f"  {_shown(name)[1:-1]}: nothing -> {_shown(value)}")
        elif not (name in several and value == several[name]) and not same_part(name, value, own):
            lines += _apart(name, canonical(own), canonical(value))
    return lines


def check_bounds(config: Any) -> None:
    """Refuse what no config is: nested too deeply, of too many values, with keys that are no texts.

    Raises:
        InputError: Before anything is compared, which takes a time for each value.
    """
    level, count = [config], 0
    for _ in range(DEEPEST):
        if any(isinstance(node, dict) and not all(isinstance(key, str) for key in node) for node in level):
            raise InputError("A config's keys must be texts, and one of these is none.")
        parts = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        count += len(level)
        if count + sum(map(len, parts)) > MOST_VALUES:
            raise InputError(f"A config holds more than {MOST_VALUES} values, and none of these is so large.")
        level = [value for part in parts for value in part]
        if not level:
            return
    raise InputError(f"A config is nested too deeply: more than {DEEPEST} levels.")


def settings_in(config: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings in a config without :func:`differences`; those that ship as an expression are left out."""
    theirs = current_names(config)
    merged = {name: theirs.get(name, own) for name, own in shipped.items() if name in SETTINGS}
    return {name: value for name, value in merged.items() if is_data(value)}


def refuse_code(place: Path, lines: list[str], versions: Mapping[str, Any]) -> None:
    """Refuse a config with differences.

    Args:
        place: Its file.
        lines: From :func:`differences`.
        versions: Of the packages that wrote it.

    Raises:
        InputError: With the first of them.
    """
    if lines:
        more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        theirs, ours = versions.get("mri-alm"), version("mri-alm")
        other = "" if theirs == ours else f" mri-alm {_shown(theirs)} wrote it, and this is {ours}."
        raise InputError(
            "\n".join([f"{place} differs from the shipped config in more than settings:", *lines[:_SHOWN], *more])
            + f"\nSuch a config is a program, and nothing of it was run.{other} If you wrote it yourself, or trust "
            "whoever did, add --trust (in a config --trust True): docs/security.md."
        )


def _setting_problem(name: str, value: Any, own: Any) -> list[str]:
    if canonical(value) == canonical(own) and type(value) is type(own):
        return []  # expressions of defaults among them
    if not is_data(value):
        return [f"  {name}: {_shown(value)} is an expression, and a setting is a value"]
    problem = SETTINGS[name].problem(value)
    return [f"  {name}: {_shown(value)}, {problem}"] if problem else []


def _apart(place: str, own: Any, theirs: Any) -> Iterator[str]:
    """The innermost places at which two values differ."""
    if isinstance(own, dict) and isinstance(theirs, dict):
        for key in sorted({*own, *theirs}, key=str):
            yield from _apart(f"{place}::{key}", own.get(key, _ABSENT), theirs.get(key, _ABSENT))
    elif isinstance(own, list) and isinstance(theirs, list):
        for number, pair in _paired(own, theirs):
            yield from _apart(f"{place}::{number}", *pair)
    elif own is _ABSENT or theirs is _ABSENT or json.dumps(own) != json.dumps(theirs):
        yield f"  {_shown(place)[1:-1]}: {_shown(own)} -> {_shown(theirs)}"


def _paired(own: list[Any], theirs: list[Any]) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Entries of two lists that stand for one another and are not equal, with their number in the second."""
    before, after = ([json.dumps(entry, sort_keys=True) for entry in entries] for entries in (own, theirs))
    for tag, start, end, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from enumerate(zip_longest(own[start:end], theirs[first:last], fillvalue=_ABSENT), first)


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else shown(value, _LONGEST)
