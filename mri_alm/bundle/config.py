"""What `python -m monai.bundle run` does with our configs: refuse what cannot be meant, claim the run folder.

MONAI gives an expression in a config no way to the config it stands in, so :func:`running_parser` looks for the
running parser in the calling frames (docs/decisions.md, 2).
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from monai.bundle import ConfigParser
from monai.bundle.properties import InferProperties, TrainProperties
from monai.bundle.reference_resolver import ReferenceResolver
from monai.utils import BundlePropertyConfig

from mri_alm.alm import processes
from mri_alm.alm.schedule import preset
from mri_alm.bundle.old_runs import same_part
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import (
    CHOICES,
    FREE_SETTINGS,
    MARKS,
    RENAMED_SETTINGS,
    SETTINGS,
    TABLE,
    check_values,
    current_names,
    profile,
    read_words,
    settle,
)
from mri_alm.errors import InputError, did_you_mean
from mri_alm.runtime.console import tolerate_any_letter
from mri_alm.runtime.files import write_json
from mri_alm.runtime.interruption import answer_signals, user_errors

logger = logging.getLogger("mri_alm")

PACKAGES = ("mri-alm", "torch", "monai", "SimpleITK", "numpy", "scikit-learn")
_MONAI = os.path.join("monai", "bundle", "__main__.py")  # noqa: PTH118 - the end of sys.argv[0]
_FREE_PARTS = ("device", "local_rank", "replica", "initialize", "finalize")  # what configs/multi_gpu.json sets
_KNOWN = (  # the last three are read by mri_alm.training, and by MONAI's --tracking
    "imports", "initialize", "run", "finalize", "prepared", "prepared_batches", "initial_weights",
    "tracking", "tracking_uri", "save_execute_config",
)  # fmt: skip


def join(device: Any) -> None:
    """The first line of ``initialize`` under ``torchrun``: see :func:`mri_alm.alm.processes.start`."""
    with user_errors():
        processes.start(device)


def check() -> None:
    """The first line of a config's ``initialize``: refuse settings that do not exist or cannot be meant."""
    tolerate_any_letter()
    with user_errors():
        parser = running_parser()
        config: dict[str, Any] = parser.get()
        answer_signals("start the same command again" if "trained" in config else None)
        if "run" not in config:
            raise InputError(
                "This config only changes another one. Name both, that one first, such as "
                "--config_file \"['configs/cifar10_binary.json','configs/cifar100_binary.json']\""
            )
        own_tracking(config)
        if sys.argv[0].endswith(_MONAI):
            config |= read_words(typed_words(sys.argv[1:]))
        rename_settings(config)
        settle(config)
        check_names(config)
        check_values(config)
        parser.parse(reset=True)  # what refers to a setting that was read anew
        check_values(with_choices(config))  # a size of one's own against the stages of a profile
        check_device(parser)


def typed_words(words: Sequence[str]) -> dict[str, str]:
    """Names and values of ``--name value`` and ``--name=value``, as they were typed; the last one of a name counts."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if re.match("--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if equals:
                found[name], name = value, ""
        elif name:
            found[name], name = word, ""
    return found


def rename_settings(config: dict[str, Any]) -> None:
    """Understand the old spelling of a setting, and say the new one."""
    found = [old for old in RENAMED_SETTINGS if old in config and RENAMED_SETTINGS[old] in referenced(config)]
    for old in found:
        new = RENAMED_SETTINGS[old]
        logger.warning("Setting %s is called %s now; it is understood.", old, new)
        config[new] = config.pop(old)


def own_tracking(config: dict[str, Any]) -> None:
    """Take MONAI's ``--tracking mlflow``, which the config itself never sees, as its setting ``tracking``.

    MONAI adds settings, and handlers that start a run of their own per split, or none where the config is made of
    parts: see docs/decisions.md (46).
    """
    if "tracking" not in config or "is_not_rank0" not in config:
        return
    handlers = config["train"]["handlers"]
    config["train"]["handlers"] = [one for one in handlers if one.get("_target_") != "MLFlowHandler"]
    config["validate"]["evaluator"].pop("val_handlers", None)
    for name in ("output_dir", "experiment_name", "run_name", "is_not_rank0"):
        config.pop(name, None)
    config |= {"tracking": "mlflow", "save_execute_config": False}


def check_device(parser: ConfigParser) -> None:
    """Take a ``device`` given as text, and refuse one that this machine lacks, or ``amp`` without a GPU.

    Raises:
        InputError: Saying what the machine has.
    """
    config: dict[str, Any] = parser.get()
    if "device" not in config:
        return
    given = parser.get_parsed_content("device")
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise InputError(f"device must be cpu, cuda, or one GPU such as cuda:0, got {given}.") from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cpu": 1, "cuda": gpus, "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= there.get(device.type, 0):
        raise InputError(
            f"device is {device}, but PyTorch sees {gpus} GPUs (CUDA) here. Leave --device out, which takes what there "
            "is, or look at the driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES."
        )
    if config.get("amp") is True and device.type != "cuda":
        raise InputError(f"amp needs a GPU (CUDA), and device is {device}. Leave --amp out.")
    if not isinstance(given, torch.device):
        config["device"] = f"$torch.device('{device}')"
        parser.parse(reset=True)


def require_checkout(files: Sequence[str]) -> None:
    """Refuse to start in a folder where MONAI would not find the configs and their parts.

    Args:
        files: The config files asked for.

    Raises:
        InputError: Naming the first one that is missing.
    """
    for path in (*map(Path, files), Path("configs/parts")):
        if not path.exists():
            raise InputError(
                f"There is no {path} in this folder. Start in the checkout, whose configs name their parts from there; "
                "cohort, run_dir and other paths may lie anywhere."
            )


def check_names(config: dict[str, Any]) -> None:
    """Refuse a top-level setting that nothing in the config refers to: almost always a misspelt override.

    A setting at its default may be one that a part of one's own, such as another network, has no use for.

    Raises:
        InputError: Naming the setting and the nearest one that exists.
    """
    used = referenced(config)
    for name, value in config.items():
        idle = any(name in settings and settings[name].default == value for settings in TABLE.values())
        if name not in used and not name.startswith("_") and not idle:
            near = did_you_mean(name, sorted(used & {*SETTINGS}) or sorted(used))
            raise InputError(f'There is no setting "{name}". {near}'.rstrip())


def referenced(config: dict[str, Any]) -> set[str]:
    """Top-level names that mean something: to MONAI, or because an expression of the config refers to them."""
    properties = [str(p[BundlePropertyConfig.ID]) for p in (*TrainProperties.values(), *InferProperties.values())]
    used = {*_KNOWN, *(ReferenceResolver.split_id(name)[0] for name in properties)}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for child in value.values():
                visit(child)
        elif isinstance(value, list):
            for child in value:
                visit(child)
        elif isinstance(value, str):
            used.update(ReferenceResolver.split_id(name)[0] for name in ReferenceResolver.match_refs_pattern(value))

    visit(config)
    return used


def with_choices(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what its preset and its profile give in place of ``"$@chosen.x"`` and ``"$@profiled.x"``.

    Nothing is evaluated: the config may be anybody's. What is neither stays as it is.

    Raises:
        InputError: If there is no preset or no profile of that name.
    """
    found = dict(config)
    for start, setting, options in zip(CHOICES, ("preset", "profile"), (preset, profile), strict=True):
        name = config.get(setting, SETTINGS[setting].default)
        if not isinstance(name, str) or name.startswith((*MARKS,)):
            continue
        choices = options(name)
        for key, value in config.items():
            if isinstance(value, str) and value.startswith(start):
                attribute = value.removeprefix(start)
                found[key] = getattr(choices, RENAMED_SETTINGS.get(attribute, attribute), value)
    return found


def choose(options: dict[str, Any], name: str, what: str) -> Any:
    """The option of that name.

    Raises:
        InputError: Naming the nearest option, and all there are.
    """
    if name in options:
        return options[name]
    hint = did_you_mean(name, options)
    raise InputError(f'There is no {what} "{name}". {hint}Choose one of: {", ".join(options)}.')


def refuse_other_settings(run: RunFolder, config: dict[str, Any]) -> None:
    """Refuse a run folder that holds a run with other settings.

    A setting that did not exist when the run was made counts as its default, and parts that ship with the package as
    what ships now, where that gives the same results (:mod:`mri_alm.bundle.old_runs`).

    Raises:
        InputError: Naming each setting that changed, with both values.
    """
    if not run.config.exists():
        return
    mine = with_choices(_as_json(config))
    theirs = with_choices(current_names(run.record["config"]))
    for name, setting in SETTINGS.items():
        if name in mine and name not in theirs:
            theirs[name] = with_choices({"preset": theirs.get("preset"), name: setting.default})[name]
    changed = [
        f"  {name}: {json.dumps(theirs.get(name))} -> {json.dumps(mine.get(name))}"
        for name in sorted({*mine, *theirs} - {*FREE_SETTINGS, *_FREE_PARTS})
        if not same_part(name, theirs.get(name), mine.get(name))
    ]
    if changed:
        text = "\n".join(line if len(line) < 300 else line[:297] + "..." for line in changed)
        raise InputError(
            f"{run.path} holds a run with other settings:\n{text}\n"
            "Models of different settings are not mixed. Give this run another --run_dir, or delete that folder."
        )


def write_run_config(run: RunFolder, config: dict[str, Any]) -> None:
    """Write the resolved config into a run folder (see :func:`refuse_other_settings`)."""
    mine = _as_json(config)
    settings = {
        name: value
        for name, value in with_choices(mine).items()
        if name in SETTINGS or not isinstance(value, (dict, list))
    }
    settings = {name: value for name, value in settings.items() if not str(value).startswith(("$", "@", "%"))}
    versions = {name: version(name) for name in PACKAGES}
    write_json(run.config, {"settings": settings, "versions": versions, "config": mine})


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in config.items() if k != "_meta_"}
    return cast(dict[str, Any], json.loads(json.dumps(plain, default=_path_as_text)))


def _path_as_text(path: Any) -> str:
    """A path as text that MONAI does not evaluate when it reads it back."""
    text = os.fspath(path)
    return f"./{text}" if text.startswith((*MARKS,)) else text


def member_parser(config: dict[str, Any], split: int, cohort: Any) -> ConfigParser:
    """The same config for one split, sharing the cohort that is already read and checked."""
    parser = ConfigParser(deepcopy(config))
    parser["only_split"] = split
    parser["cohort_data"] = cohort
    return parser


def running_parser() -> ConfigParser:
    """The parser of the config, macros resolved and overrides applied, that the calling expression stands in."""
    frame = sys._getframe(1)
    while frame is not None:
        parser = frame.f_locals.get("self")
        if isinstance(parser, ConfigParser):
            return parser
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("mri_alm.bundle works inside the expressions of a MONAI bundle config only.")


def running_config() -> dict[str, Any]:
    """What stands in it."""
    config: dict[str, Any] = running_parser().get()
    return config
