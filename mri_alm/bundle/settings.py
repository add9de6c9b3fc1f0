"""The one table of settings (``settings.yaml``) and what comes from it: checks, and which are free and private.

``docs/settings.md`` is written from it too (``make settings``).
"""

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from mri_alm.errors import InputError

MARKS = {"$": "code", "@": "a reference", "%": "a file"}  # first characters of what MONAI does not take for text


CHOICES = ("$@chosen.", "$@profiled.")  # how a config asks for what its preset and its profile give


@dataclass(frozen=True)
class Profile:
    """What fits a machine and a purpose together: the grid, the network, and how its steps are computed.

    Attributes:
        spacing: Of the grid, millimetres.
        size: Its points.
        architecture: See :func:`mri_alm.networks.exam_network`.
        features: Channels of the network's stages.
        norm: Its normalisation, as MONAI names it.
        bfloat16: See :class:`mri_alm.networks.AutocastInferer`.
        learning_rate: Of the optimiser.
    """

    spacing: list[float]
    size: list[int]
    architecture: str
    features: list[int]
    norm: list[Any]
    bfloat16: bool | str
    learning_rate: float


PROFILES = {
    "laptop": Profile(
        spacing=[2.8, 2.8, 3.0],
        size=[40, 40, 28],
        architecture="two_branch",
        features=[8, 16, 32],
        norm=["instance", {"affine": True}],
        bfloat16=False,
        learning_rate=0.002,
    ),
    "clinical": Profile(
        spacing=[0.75, 0.75, 3.0],
        size=[160, 160, 28],
        architecture="residual",
        features=[16, 32, 64, 128],
        norm=["group", {"num_groups": 8}],
        bfloat16="gpu",
        learning_rate=0.0002,  # at 0.001 and 0.002 it learnt nothing in 15 to 20 epochs (docs/recipe.md)
    ),
}


def profile(name: str) -> Profile:
    """The choices of that name: ``laptop`` or ``clinical``.

    Raises:
        InputError: If there is none.
    """
    if name not in PROFILES:
        raise InputError(f'There is no profile "{name}". Choose one of: {", ".join(PROFILES)}.')
    return PROFILES[name]


@dataclass(frozen=True)
class Setting:
    """A line of the table.

    Attributes:
        name: Its key in the config, and its flag on the command line.
        default: That of the entry config; a text that begins with ``$`` is an expression.
        kind: A key of :data:`KINDS`.
        meaning: For people, in Markdown.
        group: Its heading.
        config: Whose setting it is: ``"prostate_alm"``, ``"inference"``, ``"cifar"`` or ``"medmnist3d"``.
        none: Whether it may be None.
        least: Of a whole number.
        most: Of a whole number; of a grid's voxels; of the weights between stages.
        words: Texts that are allowed beside the kind, such as ``auto`` of a number.
        free: Whether it may change between two starts of one run.
        private: Whether no shared file shows it: places, which name people and machines, and names of studies.
        real: What to choose for a real cohort, in Markdown.
    """

    name: str
    default: Any
    kind: str
    meaning: str
    group: str
    config: str
    none: bool = False
    least: int = 0
    most: int = 0
    words: tuple[str, ...] = ()
    free: bool = False
    private: bool = False
    real: str | int = ""

    def problem(self, value: Any) -> str:
        """What is wrong with a value, from "must be" on; empty if nothing is. Expressions are not looked into."""
        if (isinstance(value, str) and value.startswith(("$", "@"))) or (value is None and self.none):
            return ""
        fits, words = KINDS[self.kind]
        named = " or ".join(f'"{word}"' for word in self.words)
        if self.kind == "whole":
            fine = (fits(value) and self.least <= value <= self.most) or value in self.words
            return "" if fine else f"must be {words} from {self.least} to {self.most}" + (f" or {named}" * bool(named))
        if self.words:
            return (
                ""
                if fits(value) or value in self.words
                else f"must be {words.replace(', 0 or more', ' >= 0')} or {named}"
            )
        return self._beyond(value) if fits(value) else f"must be {words}"

    def _beyond(self, value: Any) -> str:
        """The same of numbers that are more than any machine here could hold."""
        if self.kind == "triple" and self.most and (math.prod(value) > self.most or any(v % 1 for v in value)):
            return f"must be whole numbers, and together at most {self.most} voxels"
        if self.kind == "triple" and not self.most and not all(0.05 <= v <= 100 for v in value):
            return "must be from 0.05 to 100 millimetres"
        if (
            self.kind == "wholes"
            and self.most
            and (len(value) > MOST_STAGES or sum(a * b for a, b in pairwise([1, *value])) > self.most)
        ):
            return f"must be at most {MOST_STAGES} numbers, the products of neighbours together at most {self.most}"
        return ""

    def typed(self, word: str, value: Any) -> Any:
        """What a word of the command line means; its parser reads ``20240101``, ``1_3``, ``1e3`` and ``a#b`` as Python.

        Args:
            word: As it was typed.
            value: What the parser made of it; kept where that is what this kind of setting takes.

        Returns:
            The value. A path that holds a mark of MONAI's is a ``Path``, and names are a tuple: it looks into neither.
        """
        if self.kind == "names":
            return names_in(word)
        if self.kind not in ("text", "path"):
            return value
        text = value if isinstance(value, str) and word[:1] in ("'", '"') else word
        return Path(text) if self.kind == "path" and ("#" in text or "::" in text) else text


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, 0 or more; True and False are none."""
    return type(value) in (int, float) and 0 <= value < math.inf


def is_data(value: Any) -> bool:
    """Whether MONAI takes a value as it stands: numbers, words and lists of them, and no text that it evaluates."""
    if isinstance(value, dict):
        named = all(isinstance(key, str) and key.isidentifier() and key[0] != "_" for key in value)
        return named and all(map(is_data, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_data, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int)) or (isinstance(value, str) and value[:1] not in MARKS)


def _is_triple(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(is_number(v) and v > 0 for v in value)


def _is_wholes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(v) is int and v > 0 for v in value)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value))


def _is_scalar(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


def _is_norm(value: Any) -> bool:
    name, arguments = value if isinstance(value, (list, tuple)) and len(value) == 2 else (value, {})
    plain = isinstance(arguments, dict) and is_data(arguments) and all(map(_is_scalar, arguments.values()))
    return isinstance(name, str) and name.isidentifier() and plain


MOST_STAGES = 8  # each halves the image

KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "whole": (lambda value: type(value) is int, "a whole number"),
    "number": (is_number, "a number, 0 or more"),
    "share": (lambda value: is_number(value) and value <= 1, "a number from 0 to 1"),
    "flag": (lambda value: isinstance(value, bool), "True or False"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "path": (lambda value: isinstance(value, (str, Path)), "a text"),
    "names": (_is_names, "a list of texts"),
    "triple": (_is_triple, 'three numbers greater than 0, such as "[40, 40, 28]"'),
    "wholes": (_is_wholes, 'a list of whole numbers greater than 0, such as "[8, 16, 32]"'),
    "norm": (_is_norm, "a normalisation by its name in MONAI, also with arguments: \"['group', {'num_groups': 4}]\""),
}


def configs_folder() -> Path:
    """Where the shipped configs lie: in an installed package beside its rooms, in a checkout beside the package."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _read() -> dict[str, dict[str, Setting]]:
    table = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text("utf-8"))
    return {
        config: {
            name: Setting(name=name, group=group, config=config, **fields | {"words": tuple(fields.get("words", ()))})
            for group, settings in groups.items()
            for name, fields in settings.items()
        }
        for config, groups in table.items()
    }


TABLE = _read()
SETTINGS: Mapping[str, Setting] = TABLE["inference"] | TABLE["medmnist3d"] | TABLE["cifar"] | TABLE["prostate_alm"]
RENAMED_SETTINGS = {  # since 0.2: the old spelling is understood, with a hint
    "acting": "constraints_in_gradient", "address": "ray_address", "bank": "negative_bank",
    "blank": "zeroed_channels", "outside": "allow_outside_paths", "split": "only_split",
}  # fmt: skip
FREE_SETTINGS = frozenset(name for name, setting in SETTINGS.items() if setting.free)
PRIVATE_SETTINGS = frozenset(
    [name for settings in TABLE.values() for name, setting in settings.items() if setting.private]
    + [*(old for old, new in RENAMED_SETTINGS.items() if SETTINGS[new].private)]
    + ["bundle_root", "part", "save_execute_config"]
)


def current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, an old spelling as the new one where that is not there as well."""
    return {new if (new := RENAMED_SETTINGS.get(old, old)) not in values else old: v for old, v in values.items()}


_NAME = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]*?))\s*(?:,|$)""")  # quoted, or up to a comma


def names_in(word: str) -> tuple[str, ...]:
    """Names that were typed as a Python list of texts, or without its quotes or brackets: ``[10000_10003, 0012]``."""
    try:
        found = ast.literal_eval(word)
    except (SyntaxError, ValueError):
        found = None
    if _is_names(found):
        return (found,) if isinstance(found, str) else tuple(found)
    inner = word.strip()
    if (inner[:1], inner[-1:]) in (("[", "]"), ("(", ")")):
        inner = inner[1:-1]
    return tuple(name for groups in _NAME.findall(inner) if (name := "".join(groups)))


def settle(config: dict[str, Any]) -> None:
    """Whole numbers typed as ``1e3`` become whole, and names a tuple, into which MONAI does not look for its marks."""
    for name, value in config.items():
        kind = SETTINGS[name].kind if name in SETTINGS else ""
        if kind == "whole" and type(value) is float and value.is_integer():
            config[name] = int(value)
        elif kind == "names" and _is_names(value) and not str(value).startswith(("$", "@")):
            config[name] = (value,) if isinstance(value, str) else tuple(value)


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse words that the command line took for text, and values that no setting can have.

    Raises:
        InputError: Naming the setting, its value and the values allowed.
    """
    table = TABLE["inference"] if "trained" in config else SETTINGS
    for name, value in config.items():
        kind = table[name].kind if name in table else ""
        word = str(value).lower() if isinstance(value, str) else ""
        if word in ("none", "null") or (word in ("true", "false") and kind not in ("text", "path")):
            right = value.capitalize() if word in ("true", "false") else "'$None'"
            raise InputError(f'{name} is the text "{value}". Write {right}.')
        if kind and (problem := table[name].problem(value)):
            quoted = ' Put it in quotes in its file, such as "0012".' if kind in ("text", "path", "names") else ""
            shown = f'"{value}"' if isinstance(value, str) and table[name].words else value
            raise InputError(f"{name} {problem}, got {shown}.{quoted}")
        if kind == "path" and isinstance(value, str) and "::" in value and not value.startswith(("$", "@")):
            raise InputError(
                f"{name} holds # or ::, which MONAI uses in configs. Give it on the command line, which is "
                "read as typed, or as a pathlib.Path."
            )
    features = config.get("features")
    for name in ("size", "resolution"):
        size = config.get(name)
        least = min(size) if isinstance(size, (list, tuple)) else size
        if isinstance(features, list) and isinstance(least, (int, float)) and least < 2 ** len(features):
            raise InputError(
                f"{name} must be at least {2 ** len(features)}, as each of {len(features)} stages halves it: {size}."
            )
    if config.get("splits") == "loo" and config.get("split_rule") != "partition":
        raise InputError("splits loo leaves one positive patient out at a time: it needs --split_rule partition.")
    if config.get("sam_radius") and (config.get("gradient_cap") is not None or config.get("negative_bank")):
        raise InputError("sam_radius works with neither gradient_cap nor negative_bank: leave out one of them.")
    split = config.get("only_split")
    if split is not None and config["splits"] != "loo" and split >= config["splits"]:
        raise InputError(f"only_split must be a whole number below splits = {config['splits']}, got {split}.")


def read_words(words: Mapping[str, str]) -> dict[str, Any]:
    """The settings among typed words, each as its kind takes it (:meth:`Setting.typed`).

    Raises:
        InputError: If MONAI would not take a word for the value that was meant.
    """
    from fire.parser import DefaultParseValue

    check_words(words)
    settings = {name: setting for name in words if (setting := _setting(name))}
    return {name: setting.typed(words[name], DefaultParseValue(words[name])) for name, setting in settings.items()}


def _setting(name: str) -> Setting | None:
    return SETTINGS.get(RENAMED_SETTINGS.get(name, name))


def check_words(words: Mapping[str, str]) -> None:
    """Refuse words of the command line that MONAI would not take for the text that was meant.

    It drops ``None`` and keeps the config's own value, in silence; takes what begins with ``$``, ``@`` or ``%`` for
    code, a reference or a file; and changes ``#``.

    Args:
        words: From :func:`typed_words`.

    Raises:
        InputError: Naming the setting.
    """
    for name, word in words.items():
        setting = _setting(name)
        if word == "None":
            raise InputError(f"MONAI ignores --{name} None. Write --{name} '$None' instead.")
        if setting and word[:1] in MARKS and word != "$None":
            raise InputError(
                f"--{name} begins with {word[0]}, which MONAI takes for {MARKS[word[0]]}, and a setting is a value. "
                f"Write the value; a file or folder of that name as ./{word}."
            )
        if setting and setting.kind == "text" and "#" in word:
            raise InputError(f"--{name} holds #, which MONAI changes into ::. Choose a value without it.")
