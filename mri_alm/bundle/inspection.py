"""What the folder of a bundle or a run holds beyond mri-alm's own configs and their settings; nothing of it is run.

Files are read with MONAI's own reader, so that what is compared is what MONAI would see.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from mri_alm.bundle.export import carried_package, inference_config
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import PRIVATE_SETTINGS, configs_folder
from mri_alm.bundle.shipped import FORMS, check_bounds, differences, settings_in, shipped_config
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError
from mri_alm.runtime.files import read_file, shown

CONFIGS = (".json", ".yaml", ".yml")
DATA = (".csv", ".html", ".jpg", ".log", ".md", ".png", ".pt", ".safetensors")
_EVENTS = "events.out.tfevents."
LARGEST = 1 << 18  # bytes of a config; of MONAI's zoo the largest has a fifth
_NOT_THE_SENDERS = ("allow_outside_paths", "trust")  # as the private settings: for the one to choose who runs it


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
    carried = carried_package() if (place / "mri_alm").is_dir() else {}
    for path in sorted(path for path in place.rglob("*") if path.is_symlink() or not path.is_dir()):
        name, ending = _text(str(path.relative_to(place)))[1:-1], path.suffix.lower()
        if _is_content(path, carried.get(path.relative_to(place).as_posix())):
            continue
        if path.is_symlink():
            found.append(_file(name, _text(f"a link to {path.readlink()}")[1:-1]))
        elif ending in CONFIGS and path.is_file():
            found.append(_config(path, place))
        elif not path.is_file():
            found.append(_file(name, "a pipe, socket or device, which may hang"))
        elif not (ending in DATA or path.name == "LICENSE" or path.name.startswith(_EVENTS) or _is_shipped(path)):
            found.append(_file(name, "no data of a run: Python or MONAI may run it"))
    found = [file for file in found if file.own or file.differences or file.calls]
    if not found:
        raise InputError(f"{place} holds no config and nothing that runs. Give the folder of a bundle or a run.")
    return found


def _file(name: str, what: str) -> InspectedFile:
    return InspectedFile(name, False, {}, calls=(("file", what),))


def _is_content(path: Path, own: bytes | None) -> bool:
    """Whether a file, no link, holds just this."""
    try:
        return own is not None and not path.is_symlink() and read_file(path, max(LARGEST, len(own))) == own
    except OSError:  # nothing to be read
        return False


def _is_shipped(path: Path) -> bool:
    shipped = configs_folder() / path.name
    return shipped.is_file() and _is_content(path, shipped.read_bytes())


def _config(path: Path, root: Path) -> InspectedFile:
    name, content = _text(str(path.relative_to(root)))[1:-1], _read(path)
    try:
        check_bounds(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    calls = tuple(_calls(content))
    forms = list(_forms(path, content)) if calls else []
    if not forms:
        return InspectedFile(name, False, {}, calls=calls)
    config, shipped = min(forms, key=lambda form: len(differences(*form)))
    if lines := differences(config, shipped):
        return InspectedFile(name, False, {}, tuple(line.strip() for line in lines), calls)
    chosen = {key: value for key, value in settings_in(config, shipped).items() if shipped[key] != value}
    if "trained" in shipped and (taken := chosen.keys() & {*PRIVATE_SETTINGS, *_NOT_THE_SENDERS}):
        lines = [f"{key}: {shown(chosen[key])}, which is for the one to say who runs it" for key in sorted(taken)]
        return InspectedFile(name, False, {}, tuple(lines), calls)
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


def _calls(node: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Everything in a config that MONAI would call, evaluate or read."""
    if isinstance(node, dict):
        for key, value in node.items():
            inner = f"{place}::{key}".lstrip(":")
            if key.endswith("_target_"):  # also of +_target_, which MONAI merges
                yield _text(inner)[1:-1], _text(value)
            else:
                yield from _calls(value, inner)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _calls(value, f"{place}::{number}".lstrip(":"))
    elif isinstance(node, str) and node[:1] in ("$", "%"):
        yield _text(place)[1:-1], _text(node)


def _text(value: Any) -> str:
    """In one line that a terminal only prints; YAML also has dates."""
    return json.dumps(value, default=str)
