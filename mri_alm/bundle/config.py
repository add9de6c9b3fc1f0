"""What `python -m monai.bundle run` does with our configs: refuse what cannot be meant, claim the run folder.

MONAI gives an expression in a config no way to the config it stands in, so :func:`running_config` looks for the
running parser in the calling frames (docs/decisions/0002-one-command-for-ten-splits.md).
"""

import contextlib
import difflib
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from monai.bundle import ConfigParser
from monai.bundle.properties import InferProperties, TrainProperties
from monai.bundle.reference_resolver import ReferenceResolver
from monai.utils import BundlePropertyConfig

from mri_alm.alm import processes
from mri_alm.alm.schedule import preset
from mri_alm.bundle.settings import FREE_SETTINGS, PACKAGES, _is_expression, check_values
from mri_alm.errors import InputError, find_cause
from mri_alm.runtime.files import read_json, write_json

logger = logging.getLogger("mri_alm")
_KNOWN = (  # the last four are read by mri_alm.training.run, and by MONAI's --tracking
    "imports", "initialize", "run", "finalize", "prepared", "tracking", "tracking_uri", "save_execute_config",
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
        config = running_config()
        own_tracking(config)
        check_words(sys.argv[1:])
        check_names(config)
        check_values(config)
        if not _is_expression(config.get("preset", "$")):
            preset(config["preset"])


def own_tracking(config: dict[str, Any]) -> None:
    """Take MONAI's ``--tracking mlflow``, which the config itself never sees, as its setting ``tracking``.

    MONAI adds settings, and handlers that start a run of their own per split, or none where the config is made of
    parts (docs/decisions/0046-mlflow-by-its-client.md).
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
            near = difflib.get_close_matches(name, sorted(used), 1, 0.5)
            raise InputError(f'There is no setting "{name}".' + (f' Did you mean "{near[0]}"?' if near else ""))


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
    near = difflib.get_close_matches(str(name), options, 1, 0.5)
    hint = f'Did you mean "{near[0]}"? ' if near else ""
    raise InputError(f'There is no {what} "{name}". {hint}Choose one of: {", ".join(options)}.')


def refuse_other_settings(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a run folder that holds a run with other settings.

    Raises:
        InputError: Naming each setting that changed, with both values.
    """
    path = folder / "config.json"
    mine = _as_json(config)
    if path.exists():
        theirs = read_json(path)["config"]
        changed = [
            f"  {name}: {json.dumps(theirs.get(name))} -> {json.dumps(mine.get(name))}"
            for name in sorted({*mine, *theirs} - {*FREE_SETTINGS})
            if mine.get(name) != theirs.get(name)
        ]
        if changed:
            text = "\n".join(line if len(line) < 300 else line[:297] + "..." for line in changed)
            raise InputError(
                f"{folder} holds a run with other settings:\n{text}\n"
                "Models of different settings are not mixed. Give this run another --run_dir, or delete that folder."
            )


def write_run_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the resolved config into a run folder (see :func:`refuse_other_settings`)."""
    mine = _as_json(config)
    settings = {
        name: value
        for name, value in mine.items()
        if not isinstance(value, (dict, list)) or name in ("size", "spacing", "exclude")
    }
    chosen = ConfigParser(deepcopy(config))
    settings = {
        name: chosen.get_parsed_content(name) if str(value).startswith("$@chosen.") else value
        for name, value in settings.items()
    }
    settings = {name: value for name, value in settings.items() if not str(value).startswith(("$", "@", "%"))}
    versions = {name: version(name) for name in PACKAGES}
    write_json(folder / "config.json", {"settings": settings, "versions": versions, "config": mine})


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps({k: v for k, v in config.items() if k != "_meta_"})))


def member_parser(config: dict[str, Any], split: int, cohort: Any) -> ConfigParser:
    """The same config for one split, sharing the cohort that is already read and checked."""
    parser = ConfigParser(deepcopy(config))
    parser["only_split"] = split
    parser["cohort_data"] = cohort
    return parser


def running_config() -> dict[str, Any]:
    """The config, macros resolved and overrides applied, that the calling expression stands in."""
    frame = sys._getframe(1)
    while frame is not None:
        parser = frame.f_locals.get("self")
        if isinstance(parser, ConfigParser):
            config: dict[str, Any] = parser.get()
            return config
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("mri_alm.bundle.config works inside the expressions of a MONAI bundle config only.")
