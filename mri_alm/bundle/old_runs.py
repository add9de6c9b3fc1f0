"""Runs made by earlier versions: they score and are gone on with as if nothing had changed.

Nothing has to be converted. Names of modules that moved are understood (:mod:`mri_alm.moved`); here is what else
changed its form, not its results.
"""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Hashable, Mapping
from pkgutil import resolve_name
from typing import Any

from monai.transforms import Transform

from mri_alm.bundle.settings import CHOICES, RENAMED_SETTINGS, profile
from mri_alm.bundle.transforms import LoadRegisteredExamd

logger = logging.getLogger("mri_alm")

# Digests of parts of the shipped configs, old ones and the one that ships now, that give the same results for the same
# settings. A test says which digest to add when a part changes; if its results change too, it does not belong here.
SAME_RESULTS: dict[str, tuple[frozenset[str], ...]] = {
    # of the CIFAR configs, whose "prepared" is called prepared_batches now; 74234e98afe7498f is that of nothing
    "prepared": (frozenset({"4388f65cd3a6f00b", "74234e98afe7498f"}),),
    "prepared_batches": (
        frozenset({"74234e98afe7498f", "3d090b5b30688f4b"}),
        frozenset({"74234e98afe7498f", "c5c87d1b680afd73"}),  # of the prostate config
    ),
    # the splits can be a partition, and phantoms difficult, which they are not in runs of before
    "cohort_data": (frozenset({"63c92aa586e04fd2", "84c5dff89b824cef", "743a5b7d050aa735"}),),
    # load and register are one transform; the report travels as it is, so batches name their collate function
    "preprocessing": (
        frozenset({"7c7fd62bb709a60e", "c8b8e2470f29aca4"}),
        # glands can be looked for (localise), which they are not in runs of before
        frozenset({"c4c2e96cc3780f1f", "44b2b4cee428e958"}),
    ),
    # later ones can also leave out high b, with a chance that is 0 in runs of before; the last one also has a schedule
    # of the learning rate, which was constant, a choice of optimisers, which was Adam, and of augmentation; the first
    # five are of seeds that later changed. The trainer can look for flat minima (SAM), which it did not before, and
    # how many positives a batch holds is computed: of the prostate config, of CIFAR's two classes, of its long tails,
    # of MedMNIST
    "train": (
        frozenset({"14b885b389488617", "549f4f9f3a1b7c4e", "d5d7581f0e751d77", "3a269908203e2696", "a127442e40fa956c"}),
        frozenset({"bffa4f6d2a62e3f6", "504c08d32153d6a5"}),
        frozenset({"45d0a55ff74397cc", "aefc87f2ef6f6b67"}),
        frozenset({"705f31b99dbb237b", "3b97ac0ce46a3353"}),
        frozenset({"96db1868ca854eb6", "e1ae83a195aa7877"}),
    ),
    "optimizer": (frozenset({"1b1467d20ab107a8", "0f12752c23257f6e"}),),
    "augmentations": (frozenset({"74234e98afe7498f", "2fde9dace1db8c60"}),),
    "optimisers": (frozenset({"74234e98afe7498f", "d09d13630501c3b1"}),),
    # further losses to choose from, whose prior is that of the batches as they are
    "losses": (frozenset({"d7f18e65136822eb", "94b10f28523cdce4", "8e0cc95f82833982", "67458c3a9188f749"}),),
    "validate": (frozenset({"165075c2698e86a8", "bf1844af98c52ddc"}),),
    # the network can be another one (architecture, fusion, pooling), which it is not in runs of before
    "network_def": (frozenset({"9b4a87bacfb00306", "86e231bec759eaa2"}),),
    # grid and network can be those of another profile than the laptop, whose are those of before; the first is nothing
    "profiled": (frozenset({"74234e98afe7498f", "e445b5ea4eb47c19"}),),
    # a training can begin with the weights of another run, which those of before did not
    "initial_weights": (frozenset({"74234e98afe7498f", "80dc4e54045ad0c2"}),),
    # multipliers can fall, constraints tolerate and mu follow the violation, which they do not in runs of before; the
    # second is of long tails
    "objective_def": (
        frozenset({"7542790d43528ec6", "6a8adff4edee7604"}),
        frozenset({"57176ae9a31662e2", "c86e1121cd51d40d"}),
    ),
    # the weights can be averaged (ema), which they are not in runs of before; the second is of long tails
    "epoch_end": (
        frozenset({"525a3456190ffbc1", "8aff18430ea2383a"}),
        frozenset({"18b28a45be91936f", "086a1287a79204b4"}),
    ),
    # of bundles: the folder may also be given as output_dir, and scoring watches for a promise that lost its ground
    "run": (frozenset({"44c2b67c9936bcff", "70f019bf4ce6885c"}),),
    "watch": (frozenset({"74234e98afe7498f", "64e7db3565acec17"}),),
}
# Parts whose results did change: digests of earlier forms, of the one that ships now, and where in the part the change
# is. A run goes on with its own. So are settings whose default changed.
OWN_PARTS: dict[str, tuple[frozenset[str], str, tuple[Any, ...]]] = {
    # exams are normalised within masks, have the voxels that they have from a prepared cohort, and (the last two had
    # not) have those in one order, however they are stored
    "preprocessing": (
        frozenset({"7c7fd62bb709a60e", "c8b8e2470f29aca4", "c4c2e96cc3780f1f", "44b2b4cee428e958"}),
        "dcc485d9d4171b20",
        (),
    ),
    # runs of different seeds share nothing; with seed 0 nothing changed
    "seed_everything": (frozenset({"147e0e91e63bb781"}), "bf7377565d11e561", ()),
    "train": (
        frozenset({"14b885b389488617", "549f4f9f3a1b7c4e", "d5d7581f0e751d77", "3a269908203e2696"}),
        "504c08d32153d6a5",
        ("handlers", 0, "seed"),
    ),
    # by default the last epoch's weights are kept, which were those of the best validation AUC, and every batch holds
    # positives, where they were as they came
    "preset": (frozenset({"1080a60800d9e5bd", "e6f6a80de731867e"}), "f1af9a4d61178230", ()),
    "positives_per_batch": (frozenset({"74234e98afe7498f"}), "005d631b25db4220", ()),
    # that of the clinical profile, which had the laptop's
    "learning_rate": (frozenset({"8d938122d3904436"}), "aa63f092f4070e5c", ()),
    # the clinical profile had parts of two exams, which round otherwise
    "micro_batch": (frozenset({"d4735e3a265e16ee"}), "74234e98afe7498f", ()),
}
# Of those, the ones with which a model scores, as it was trained, though its config is not trusted: they shipped.
SCORED_WITH = {"preprocessing": frozenset({"c4c2e96cc3780f1f", "44b2b4cee428e958"})}
_OF_SEEDS = {"seed_everything", "train"}

_NAME = re.compile(r"\bmri_alm(?:\.\w+)+")
_RENAMED = RENAMED_SETTINGS | {"guard": "split_digest"}
_REFERENCE = re.compile(rf"(?<=[@.])({'|'.join(_RENAMED)})\b(?!::)")


class LoadProstateStudyd(Transform):
    """The first transform of version 0.1.0: does nothing, as :class:`RegisterDiffusiond` loads the exam too."""

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The item as it is."""
        return dict(data)


class RegisterDiffusiond(LoadRegisteredExamd):
    """The second transform of version 0.1.0."""


def canonical(part: Any) -> Any:
    """A part of a config with every name of ours as where it is defined, and every reference as it is spelt now."""
    if isinstance(part, dict):
        names = {key: _RENAMED.get(key, key) for key in part}
        return {key if names[key] in part else names[key]: canonical(value) for key, value in part.items()}
    if isinstance(part, list):
        return [canonical(value) for value in part]
    if isinstance(part, str):
        part = _REFERENCE.sub(lambda match: _RENAMED[match[1]], part)
        return _NAME.sub(lambda match: _defined(match[0]), part)
    return part


def part_digest(part: Any) -> str:
    """Of a part of a config, names in their canonical form."""
    return hashlib.sha256(json.dumps(canonical(part), sort_keys=True).encode()).hexdigest()[:16]


def same_part(name: str, theirs: Any, mine: Any) -> bool:
    """Whether two values of a top-level key of a config mean the same."""
    if canonical(theirs) == canonical(mine):
        return True
    both = {part_digest(theirs), part_digest(mine)}
    return any(both <= group for group in SAME_RESULTS.get(name, ()))


def as_it_began(config: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A config with those parts of :data:`OWN_PARTS` that a run of an earlier version began with.

    Its results would change in the middle otherwise. A part that somebody changed stays as it is, and is refused.

    Args:
        config: As it ships now, overrides applied.
        theirs: That of the run.
    """
    kept = {
        name: _with_theirs(config[name], canonical(theirs[name]), place)
        for name, (earlier, ships, place) in OWN_PARTS.items()
        if name in theirs and part_digest(_shipped(config, name)) == ships and part_digest(theirs[name]) in earlier
    }
    changed = kept.keys() - (set() if config.get("seed") else _OF_SEEDS)
    if changed:
        logger.warning(
            "This run began with parts or defaults of an earlier version and goes on as it began: %s. Train a new run "
            "to have those of now (CHANGELOG).",
            ", ".join(sorted(changed)),
        )
    return config | kept


def own_for_scoring(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a run's config, by name, that are among :data:`SCORED_WITH`."""
    return {
        name: canonical(theirs[name])
        for name, digests in SCORED_WITH.items()
        if name in theirs and part_digest(theirs[name]) in digests
    }


def _shipped(config: Mapping[str, Any], name: str) -> Any:
    """A part, or the value that the config's profile gives in its place."""
    value = config.get(name)
    given = isinstance(value, str) and value.startswith(CHOICES[1])
    return getattr(profile(config["profile"]), name) if given else value


def _with_theirs(mine: Any, theirs: Any, place: tuple[Any, ...]) -> Any:
    """A part with what theirs has at a place in it, keys and numbers of items; theirs where the place is the whole."""
    if not place:
        return theirs
    copy = mine.copy()
    copy[place[0]] = _with_theirs(mine[place[0]], theirs[place[0]], place[1:])
    return copy


def _defined(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            found = resolve_name(name)
            place = f"{found.__module__}.{found.__qualname__}"
            return place if resolve_name(place) is found else name  # a wrapped function has the name of another one
        except Exception:  # whatever the attributes of strangers' names raise
            return name
