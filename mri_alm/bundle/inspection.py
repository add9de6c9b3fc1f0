"""What the folder of a bundle or a run holds beyond mri-alm's own configs and their settings; nothing of it is run.

Files are read with MONAI's own reader, so that what is compared is what MONAI would see.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from mri_alm.bundle.export import inference_config
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.shipped import FORMS, configs_folder, differences, settings_in, shipped_config
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError
from mri_alm.runtime.files import read_file

CONFIGS = (".json", ".yaml", ".yml")
PROGRAMS = {
    **dict.fromkeys((".dll", ".egg", ".pth", ".py", ".pyc", ".pyd", ".pyw", ".pyz", ".so", ".whl", ".zip"), "code"),
    **dict.fromkeys((".joblib", ".pickle", ".pkl"), "a pickle, which runs code when it is read"),
    **dict.fromkeys((".ts", ".onnx"), "a network with its program, which is not looked into"),
    **dict.fromkeys((".conf", ".ini", ".cfg"), "a configuration, which Python's logging would evaluate"),
}
LARGEST, MOST = 1 << 24, 200_000  # bytes of a file; values in it, aliases of YAML counted each time


@dataclass(frozen=True)
class InspectedFile:
    """One file that says what runs.

    Attributes:
        name: Relative to what was inspected.
        own: Whether it is one of mri-alm's configs, or differs from it in settings only.
        settings: Then: those that are not the shipped config's.
        differences: Else: where it differs from the config that it is a form of; empty if it is none.
        calls: Else: identifier and text of every callable, expression and file that it names.
    """

    name: str
    own: bool
    settings: dict[str, Any]
    differences: tuple[str, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()


def inspect_bundle(place: Path) -> list[InspectedFile]:
    """All files of a bundle's, run's or config folder that say what runs, or one config file.

    Files of data alone are left out.

    Raises:
        InputError: If there is no such file or folder, or a config cannot be read.
    """
    if not place.exists():
        raise InputError(f"There is no {place}. Give the folder of a bundle, or one of its config files.")
    if not place.is_dir():
        return [_config(place, place.parent)]
    found = []
    for path in sorted(path for path in place.rglob("*") if path.is_symlink() or not path.is_dir()):
        name, ending = str(path.relative_to(place)), path.suffix.lower()
        if path.is_symlink():
            found.append(InspectedFile(name, False, {}, calls=(("file", f"a link to {path.readlink()}"),)))
        elif ending in CONFIGS and path.is_file():
            found.append(_config(path, place))
        elif not path.is_file():
            found.append(InspectedFile(name, False, {}, calls=(("file", "a pipe, socket or device, which may hang"),)))
        elif ending in PROGRAMS and not _is_shipped(path):
            found.append(InspectedFile(name, False, {}, calls=(("file", PROGRAMS[ending]),)))
    return [file for file in found if file.own or file.differences or file.calls]


def _is_shipped(path: Path) -> bool:
    shipped = configs_folder() / path.name
    try:
        return read_file(path, LARGEST) == shipped.read_bytes()
    except OSError:  # there is none of ours, or it is nothing to be read
        return False


def _config(path: Path, root: Path) -> InspectedFile:
    name, content = str(path.relative_to(root)), _read(path)
    try:
        calls = tuple(_calls(content))
    except RecursionError:
        raise InputError(f"{path} is nested too deeply for a config.") from None
    forms = list(_forms(path, content)) if calls else []
    if not forms:
        return InspectedFile(name, False, {}, calls=calls)
    config, shipped = min(forms, key=lambda form: len(differences(*form)))
    if lines := differences(config, shipped):
        return InspectedFile(name, False, {}, tuple(line.strip() for line in lines), calls)
    chosen = {key: value for key, value in settings_in(config, shipped).items() if shipped[key] != value}
    if chosen.get("trust"):
        return InspectedFile(name, False, {}, ("trust: true, which is for the one to say who runs it",), calls)
    return InspectedFile(name, True, chosen)


def _forms(path: Path, content: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of what a file holds and the shipped config that it may be a form of."""
    if not isinstance(content, dict):
        return
    if content.keys() == {"settings", "versions", "config"} and isinstance(content["config"], dict):
        yield from ((content["config"], shipped_config(*form)) for form in FORMS)
        return
    shipped = configs_folder() / (f"parts/{path.name}" if path.parent.name == "parts" else path.name)
    if shipped.is_file():
        yield content, _read(shipped)
    if path.name == "inference.json" and RunFolder(path.parents[1]).threshold.is_file():
        try:
            yield content, inference_config(TrainedRun(path.parents[1]))
        except InputError:
            return  # a run that differs itself, which its own line says


def _read(path: Path) -> Any:
    try:
        read_file(path, LARGEST)  # an ordinary file, of a config's size
        return ConfigParser.load_config_file(str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from None
    except Exception as error:  # readers of JSON and YAML raise many types
        raise InputError(f"{path} is no config that MONAI could read ({type(error).__name__}).") from error


def _calls(node: Any, place: str = "", seen: list[int] | None = None) -> Iterator[tuple[str, str]]:
    """Everything in a config that MONAI would call, evaluate or read."""
    seen = seen if seen is not None else [0]
    seen[0] += 1
    if seen[0] > MOST:
        raise InputError(f"A config holds more than {MOST} values, and no config does. It was not read to its end.")
    if isinstance(node, dict):
        for key, value in node.items():
            inner = f"{place}::{key}".lstrip(":")
            if str(key).endswith("_target_"):  # also of +_target_, which MONAI merges
                yield inner, json.dumps(value)
            else:
                yield from _calls(value, inner, seen)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _calls(value, f"{place}::{number}".lstrip(":"), seen)
    elif isinstance(node, str) and node[:1] in ("$", "%"):
        yield place, json.dumps(node)
