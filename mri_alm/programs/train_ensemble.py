"""The main job: prepare every exam, train the splits, average them, fix a threshold, report.

Examples:
  mri-alm train                                  # the built-in phantom cohort
  mri-alm train --cohort data/mine/manifest.csv --run_dir runs/mine --max_epochs 60
  mri-alm train --config mine.yaml --workers 4   # four splits at a time
  mri-alm train --backend ray --ray-address auto --workers 10 --gpus-per-task 1 --run_dir runs/mine

Every setting may follow as `--name value`; `mri-alm settings` lists them. --config names a YAML file of settings,
`name: value` a line; what follows the command counts more. Relative paths start in this folder. Start it again after
a stop or a failure: it goes on from what is finished. Splits that are trained at once give the weights of one after
the other, bit for bit (docs/cluster.md).
It is `python -m monai.bundle run --config_file configs/prostate_alm.json`, from any folder.

exit status: 0 done, 2 something given cannot be used or a split failed, 130 stopped with Ctrl-C
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError, did_you_mean
from mri_alm.runtime.interruption import user_errors

LONGEST = 1 << 20  # bytes of a file of settings; those there are have some lines
OF_MONAI = ("logging_file", "meta_file", "properties_path", "init_id", "run_id", "final_id", "workflow_type")


def parser() -> argparse.ArgumentParser:
    """Its command line, but for the settings."""
    found = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    found.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings of your own")
    found.add_argument("--config_file", help="another MONAI config, or a Python list of them")
    found.add_argument("--backend", choices=["loky", "ray"], help="processes of this machine, or Ray")
    found.add_argument("--workers", type=int, help="splits trained at once (default: the config's, 1)")
    found.add_argument(
        "--ray-address",
        "--ray_address",
        "--address",
        help="of a Ray cluster, such as auto or head:6379 (default: start one here)",
    )
    found.add_argument(
        "--gpus-per-task", "--gpus_per_task", type=float, help="Ray: GPUs of each split; 0.5: two share one"
    )
    found.add_argument("--tracking", choices=["mlflow"], help="also record the run there")
    return found


def parse(arguments: Sequence[str] | None) -> dict[str, object]:
    """The command line as settings; what is not given is left to the config."""
    from fire.parser import DefaultParseValue

    options, words = parser().parse_known_args(arguments)
    chosen = vars(options)
    if "config_file" in chosen:
        chosen["config_file"] = DefaultParseValue(chosen["config_file"])
    own = typed_values(words_in(chosen.pop("config"))) if "config" in chosen else {}
    return own | overrides(words) | chosen


def overrides(words: Sequence[str]) -> dict[str, object]:
    """``--name value`` and ``--name=value`` pairs, values read as MONAI's command line reads them."""
    pairs = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    names, values = pairs[::2], pairs[1::2]
    if len(names) != len(values) or not all(name.startswith("--") for name in names):
        raise InputError(f"Settings are pairs such as --max_epochs 20, got: {' '.join(words)}")
    return typed_values({name[2:].replace("-", "_"): value for name, value in zip(names, values, strict=True)})


def typed_values(words: Mapping[str, str]) -> dict[str, object]:
    """What words mean that stand for values of settings, and of other parts of a config."""
    from fire.parser import DefaultParseValue

    from mri_alm.bundle.settings import read_words

    return {name: DefaultParseValue(value) for name, value in words.items()} | read_words(words)


def words_in(file: Path) -> dict[str, str]:
    """The settings of a YAML file, each value as the word that would follow the command.

    Args:
        file: ``name: value`` a line; ``true`` and ``null`` stand for ``True`` and ``None``.

    Raises:
        InputError: If it cannot be read, is no such table, or names a setting twice.
    """
    import yaml

    try:
        with file.open("rb") as opened:
            content = opened.read(LONGEST + 1)
        text = content.decode("utf-8-sig")[:LONGEST]
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise InputError(f"--config {file}: it refers to a part of itself (*name). Write the value there.")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise InputError(f"--config {file}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"at line {mark.line + 1} it" if mark else "it"
        raise InputError(f"--config {file}: {place} is not YAML. It takes lines such as max_epochs: 20") from None
    lines = node.value if isinstance(node, yaml.MappingNode) else ()
    odd = (node is not None and not isinstance(node, yaml.MappingNode)) or any(
        not isinstance(key, yaml.ScalarNode) for key, _ in lines
    )
    if len(content) > LONGEST or odd:
        raise InputError(f"--config {file}: it must hold a line a setting, such as max_epochs: 20")
    words: dict[str, str] = {}
    for key, value in lines:
        name = str(key.value).replace("-", "_")
        if name in words:
            raise InputError(f"--config {file}: line {key.start_mark.line + 1}: {name} is there twice. Keep one.")
        words[name] = _word(value)
    return words


def _word(node: Any) -> str:
    """A value of a YAML file as it would be typed: by its letters, since YAML changes those of 0012 and 1e3."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        kind, word = node.tag.rpartition(":")[2], str(node.value)
        if kind == "bool":
            return str(word.lower() in ("true", "yes", "on"))
        return "$None" if kind == "null" else word
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(_part, node.value))}]"
    return f"{{{', '.join(f'{_part(key)}: {_part(value)}' for key, value in node.value)}}}"


def _part(node: Any) -> str:
    """The same inside of a list: texts stand in quotes, and yes is one."""
    text = node.tag.endswith((":str", ":bool")) and str(node.value).lower() not in ("true", "false")
    return repr(str(node.value)) if text else _word(node)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, ensemble, report."""
    with user_errors():
        settings = parse(arguments)
        if files := settings.pop("config_file", None):
            from monai.utils import ensure_tuple

            from mri_alm.bundle.config import require_checkout

            require_checkout(ensure_tuple(files))
            workflow = _workflow(files, settings)
        else:
            workflow = _shipped_workflow(settings)
        workflow.initialize()
        workflow.run()
        workflow.finalize()
    return 0


def _workflow(files: Any, settings: Mapping[str, object]) -> Any:
    from monai.bundle import ConfigWorkflow

    return ConfigWorkflow(config_file=files, **{"workflow_type": "train"} | dict(settings))


def _shipped_workflow(settings: Mapping[str, object]) -> Any:
    """That of the shipped config, whose parts MONAI would look for in the folder where the program is started."""
    _refuse_unknown(settings)
    from mri_alm.bundle.settings import configs_folder
    from mri_alm.bundle.shipped import with_parts

    workflow = _workflow(str(configs_folder() / "prostate_alm.json"), settings)
    workflow.parser.set(with_parts(workflow.parser.get(), configs_folder()))
    return workflow


def _refuse_unknown(settings: Mapping[str, object]) -> None:
    """Names and values that cannot be meant are refused here, before the seconds that torch and MONAI take to load."""
    from mri_alm.bundle.settings import RENAMED_SETTINGS, TABLE, check_values, configs_folder, current_names, settle
    from mri_alm.runtime.files import read_json

    table = TABLE["prostate_alm"]
    parts = read_json(configs_folder() / "prostate_alm.json")
    for name in settings:
        whole = name.replace("#", "::").partition("::")[0]
        if whole not in {*parts, *RENAMED_SETTINGS, *OF_MONAI}:
            raise InputError(
                f'There is no setting "{name}". {did_you_mean(name, table)}`mri-alm settings` lists them all.'
            )
    given = current_names({name: one.default for name, one in table.items()} | dict(settings))
    settle(given)
    check_values(given)
