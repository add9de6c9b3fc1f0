"""What `python -m monai.bundle run` does with our configs: refuse what cannot be meant, claim the run folder.

MONAI gives an expression in a config no way to the config it stands in, so :func:`running_parser` looks for the
running parser in the calling frames (docs/decisions.md, 2).
"""

import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from importlib.metadata import version
from typing import Any, cast

from monai.bundle import ConfigParser
from monai.bundle.properties import InferProperties, TrainProperties
from monai.bundle.reference_resolver import ReferenceResolver
from monai.utils import BundlePropertyConfig

from mri_alm.alm import processes
from mri_alm.alm.schedule import preset
from mri_alm.bundle.old_runs import same_part
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import FREE_SETTINGS, RENAMED_SETTINGS, SETTINGS, check_values
from mri_alm.errors import InputError, did_you_mean, find_cause
from mri_alm.runtime.files import write_json

logger = logging.getLogger("mri_alm")

PACKAGES = ("mri-alm", "torch", "monai", "SimpleITK", "numpy", "scikit-learn")
_FREE_PARTS = ("device", "local_rank", "replica", "initialize", "finalize")  # what configs/multi_gpu.json sets
_KNOWN = (  # the last three are read by mri_alm.training, and by MONAI's --tracking
    "imports", "initialize", "run", "finalize", "prepared", "prepared_batches",
    "tracking", "tracking_uri", "save_execute_config",
)  # fmt: skip


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print an :class:`InputError`, also one that MONAI wrapped, without a traceback and leave with status 2."""
    try:
        yield
    except Exception as error:
        cause = find_cause(error, InputError)
        if cause is None:
            raise
        sys.stderr.write(f"\n{cause}\n")
        raise SystemExit(2) from error


def join(device: Any) -> None:
    """The first line of ``initialize`` under ``torchrun``: see :func:`mri_alm.alm.processes.start`."""
    with user_errors():
        processes.start(device)


def check() -> None:
    """The first line of a config's ``initialize``: refuse settings that do not exist or cannot be meant."""
    with user_errors():
        parser = running_parser()
        config: dict[str, Any] = parser.get()
        if "run" not in config:
            raise InputError(
                "This config only changes another one. Name both, that one first, such as "
                "--config_file \"['configs/cifar10_binary.json','configs/cifar100_binary.json']\""
            )
        own_tracking(config)
        check_words(sys.argv[1:])
        if rename_settings(config):
            parser.parse(reset=True)  # what refers to them is resolved anew
        check_names(config)
        check_values(config)
        if not str(config.get("preset", "$")).startswith(("$", "@")):
            preset(config["preset"])


def rename_settings(config: dict[str, Any]) -> bool:
    """Understand the old spelling of a setting, and say the new one; whether there was any."""
    found = [old for old in RENAMED_SETTINGS if old in config and RENAMED_SETTINGS[old] in referenced(config)]
    for old in found:
        new = RENAMED_SETTINGS[old]
        logger.warning("Setting %s is called %s now; it is understood.", old, new)
        config[new] = config.pop(old)
    return bool(found)


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


def check_words(words: Sequence[str]) -> None:
    """Refuse ``--name None`` on the command line: MONAI would drop it and keep the config's own value, in silence.

    Raises:
        InputError: Naming the setting.
    """
    for before, word in itertools.pairwise(["", *words]):
        name, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if value == "None" and name.startswith("--"):
            raise InputError(f"MONAI ignores {name} None. Write {name} '$None' instead.")


def check_names(config: dict[str, Any]) -> None:
    """Refuse a top-level setting that nothing in the config refers to: almost always a misspelt override.

    Raises:
        InputError: Naming the setting and the nearest one that exists.
    """
    used = referenced(config)
    for name in config:
        if name not in used and not name.startswith("_"):
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
    mine = _as_json(config)
    theirs = {RENAMED_SETTINGS.get(name, name): value for name, value in run.record["config"].items()}
    for name, setting in SETTINGS.items():
        if name in mine and name not in theirs:
            theirs[name] = setting.default
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
    mine, chosen = _as_json(config), ConfigParser(deepcopy(config))
    settings = {
        name: chosen.get_parsed_content(name) if str(value).startswith("$@chosen.") else value
        for name, value in mine.items()
        if name in SETTINGS or not isinstance(value, (dict, list))
    }
    settings = {name: value for name, value in settings.items() if not str(value).startswith(("$", "@", "%"))}
    versions = {name: version(name) for name in PACKAGES}
    write_json(run.config, {"settings": settings, "versions": versions, "config": mine})


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps({k: v for k, v in config.items() if k != "_meta_"})))


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
