"""A finished run as a bundle of MONAI's model zoo: configs, weights as safetensors, metadata, a card, a licence.

What could point to patients or to this machine stays behind: names of exams, the manifest, folders.
"""

import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser
from safetensors.torch import save as serialised

from mri_alm.bundle.checkpoints import save_tensors
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import PRIVATE_SETTINGS, SETTINGS, configs_folder
from mri_alm.bundle.shipped import shipped_config
from mri_alm.bundle.trained_run import Ensemble, MeanLogit, TrainedRun
from mri_alm.cohort.protocol import trained_in_words, training_note
from mri_alm.errors import InputError
from mri_alm.runtime.atomic import write_atomically
from mri_alm.runtime.files import read_json, sha256, write_bytes, write_json

_CARD = """# {name}

### **Authors**

{authors}

### **Tags**

Classification, MR, Prostate, Class imbalance, Biparametric

## **Model Description**

{description} {members} networks, {together}, then the sigmoid.

**Research only. Not a medical device; not to be used for a decision about a patient.**{note}

## **Data**

{data}Training: {trained}

#### **Preprocessing**

Diffusion is registered to T2, and all is resampled to {size} voxels of {spacing} mm. Channels: {names}. Intensities are
normalised within masks of where there is data; `config.json` has all settings.

#### **Training**

Loss `{loss}`, multipliers with preset `{preset}`. The bundle only infers; mri-alm retrains.

## **Performance**

Test AUC: {auc}.

{point}

## **Additional Usage Steps**

{needs} From this folder:

```
python -m monai.bundle run --config_file configs/inference.json --input DICOM_FOLDER_OR_MANIFEST.csv --output_dir OUT
```

or with mri-alm installed: `python pipelines/score.py --model THIS_FOLDER --input ... --output OUT`.
`models/*.safetensors` hold the members; `models/model.pt` holds the same weights for MONAI's own programs, which read
no safetensors. Look at what the configs run before you run them: `python pipelines/inspect_bundle.py THIS_FOLDER`.

## **System Configuration**

A CPU is enough; a GPU is used where there is one. {parameters} parameters in all members.
The packages' versions in `configs/metadata.json` are those of Python {python}; another Python may not have them.

## **Limitations**

{behind} At another hospital set one on a calibration cohort of your own
(`--calibration`, `--labels`). Nothing here names the exams of the training cohort, so that yours are others is yours to
know.

## **References**

{references}
"""
# metadata of version 2.1 is all that importlib.metadata.version needs to find a package that lies in a bundle
_METADATA = "Metadata-Version: 2.1\nName: mri-alm\nVersion: {}\n"


@dataclass(frozen=True)
class BundleLabel:
    """What the one who shares a model says of it; empty: what this project says.

    Attributes:
        name: Its title.
        authors: Who made it.
        version: Of this model, three numbers such as ``"1.0.0"``.
        changelog: What is new in that version.
        licence: File with the licence of the weights.
        data_source: Where the training exams come from.

    Raises:
        InputError: If the version is not three numbers, there is a changelog without a version, or no such licence.
    """

    name: str = ""
    authors: str = ""
    version: str = ""
    changelog: str = ""
    licence: Path | None = None
    data_source: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.version and not re.fullmatch(r"\d+\.\d+\.\d+", self.version):
            raise InputError(f'version must be three numbers such as 1.0.0, got "{self.version}".')
        if self.changelog and not self.version:
            raise InputError("changelog tells of a version: give --version, too.")
        if self.licence and not self.licence.is_file():
            raise InputError(f"There is no licence {self.licence}. Give a text file.")

    def metadata(self) -> dict[str, Any]:
        """The fields of ``metadata.json`` that it sets."""
        found: dict[str, Any] = {
            key: value for key in ("name", "authors", "version", "data_source") if (value := getattr(self, key))
        }
        if self.version:
            found["changelog"] = {self.version: self.changelog or "First version of this model"}
        if self.authors or self.licence:
            found["copyright"] = f"Copyright (c) {self.authors or 'the authors'}; the licence is in the file LICENSE"
        return found


def export_bundle(
    run: TrainedRun, output: Path, *, licence: Path, label: BundleLabel | None = None, carry_package: bool = False
) -> None:
    """Write a bundle of a finished run; it is meant to be shared: everybody may read it, whatever the umask.

    Args:
        run: What to share.
        output: Folder to write, new or empty.
        licence: The project's ``LICENSE``, for a label that names none.
        label: Title, authors and so on.
        carry_package: Copy this package into the bundle, so that MONAI runs it where mri-alm is not installed.

    Raises:
        InputError: If the folder is not empty or cannot be written, or the run cannot be read.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise InputError(f"{output} is not empty. Give a new folder: files of another model must not stay in a bundle.")
    members, text = run.ensemble().members, ((label and label.licence) or licence).read_bytes()
    with write_atomically(output) as part:
        _write(run, members, part, label or BundleLabel(), carry_package=carry_package)
        write_bytes(part / "LICENSE", text)
        for path in (part, *part.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def carried_package() -> dict[str, bytes]:
    """This package as a bundle carries it: paths in the bundle to contents, its configs and its version among them."""
    package = Path(__file__).parents[1]
    found = {f"mri_alm-{version('mri-alm')}.dist-info/METADATA": _METADATA.format(version("mri-alm")).encode()}
    for folder, place in ((configs_folder(), "mri_alm/configs"), (package, "mri_alm")):
        for path in sorted(folder.rglob("*.*")):
            if path.is_file() and path.suffix != ".pyc":
                found[f"{place}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return found


def _write(run: TrainedRun, members: Any, output: Path, label: BundleLabel, *, carry_package: bool) -> None:
    """All files of :func:`export_bundle` but the licence."""
    for name, member in zip(run.checkpoints, members, strict=True):
        state = {key: value.contiguous() for key, value in member.state_dict().items()}
        write_bytes(output / "models" / f"{name}.safetensors", serialised(state, {"format": "pt"}))
    digests = {name: sha256(output / "models" / f"{name}.safetensors") for name in run.checkpoints}
    save_tensors(output / "models" / "model.pt", MeanLogit(Ensemble(list(members))).state_dict())
    bundle = RunFolder(output)
    write_json(bundle.threshold, run.point.to_json() | {"checkpoints": digests})
    write_json(bundle.config, {key: _neutral(value) for key, value in run.run.record.items()})
    if run.trained_on:
        write_json(bundle.protocol, run.trained_on)
    write_json(output / "configs" / "inference.json", inference_config(run))
    write_bytes(output / "configs" / "logging.conf", (configs_folder() / "logging.conf").read_bytes())
    metadata = _metadata(read_json(configs_folder() / "metadata.json"), run) | label.metadata()
    write_json(output / "configs" / "metadata.json", metadata)
    size = sum(tensor.numel() for member in members for tensor in member.parameters())
    write_bytes(output / "docs" / "README.md", _card(metadata, run, label, size=size, carried=carry_package).encode())
    for name, content in carried_package().items() if carry_package else ():
        write_bytes(output / name, content)


def inference_config(run: TrainedRun) -> dict[str, Any]:
    """``configs/inference.json`` of a run's bundle: the run is the bundle, and the network stands there in full."""
    network = ConfigParser(deepcopy(run.config)).get_parsed_content("network_def", instantiate=False).get_config()
    return shipped_config("inference") | {
        "run_dir": "@bundle_root",
        "network_def": {
            "_target_": f"mri_alm.bundle.{'of_largest' if run.point.folds else 'averaged'}",
            "member": network,
            "count": len(run.checkpoints),
        },
        "network": "$@trained.ensemble().to(@device, memory_format=torch.channels_last_3d)",
        # not @point: MONAI's `load` initialises from any working directory, and needs no run
        "initialize": [
            "$mri_alm.bundle.check()",
            "$mri_alm.scoring.check_request(@input, sr=@sr, salt_file=@salt_file)",
        ],
    }


def _neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that name places, people and studies as they ship; the run is the bundle's own folder."""
    hidden = {name: SETTINGS[name].default for name in PRIVATE_SETTINGS & SETTINGS.keys()} | {"run_dir": "."}
    return {key: hidden.get(key, value) for key, value in values.items()}


def _metadata(metadata: dict[str, Any], run: TrainedRun) -> dict[str, Any]:
    needed = {re.split(r"[^\w.-]", line)[0] for line in requires("mri-alm") or () if "extra ==" not in line}
    packages = {name: version(name) for name in sorted(needed - {"monai", "torch", "numpy"}, key=str.lower)}
    found: dict[str, Any] = deepcopy(metadata) | {
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": packages,
        "eval_metrics": _metrics(run),
        "data_source": f"{trained_in_words(run.trained_on)} {_behind(run)}",
    }
    if run.point.folds:
        found["description"] = (
            f"{metadata['description'].partition(', ten random')[0]}, {run.point.folds} folds of patients, the largest "
            "logit of their members, threshold by the minmax rule."
        )
    if note := training_note(run.trained_on):
        found["intended_use"] += f" This model was {note}: it shows that the software works, and nothing of patients."
    found["network_data_format"]["inputs"]["image"]["spatial_shape"] = run.settings["size"]
    return found


def _behind(run: TrainedRun) -> str:
    if not run.point.n_positive:
        return "All its patients were trained on, so there is no threshold."
    return f"{run.point.n_positive} positive patients stand behind the threshold."


def _metrics(run: TrainedRun) -> dict[str, Any]:
    """The test AUC to three digits, with its interval where the run has it, and of how many exams it is."""
    test = read_json(run.run.metrics).get("test") if run.run.metrics.is_file() else None
    if not test:
        return {}
    interval = test.get("ensemble_auc_interval")
    return {
        "test_auc": round(test["ensemble_auc"], 3),
        **({"test_auc_95": [round(end, 3) for end in interval]} if interval else {}),
        "test_exams": test["positives"] + test["negatives"],
        "test_positives": test["positives"],
    }


def _auc_in_words(metrics: Mapping[str, Any]) -> str:
    if not metrics:
        return "no test cohort"
    low_high = metrics.get("test_auc_95")
    between = f" (95 % interval {low_high[0]:.3f} to {low_high[1]:.3f})" if low_high else ""
    exams = f"{metrics['test_exams']} exams, {metrics['test_positives']} of them positive"
    return f"{metrics['test_auc']:.3f}{between}, {exams}"


def _card(metadata: dict[str, Any], run: TrainedRun, label: BundleLabel, *, size: int, carried: bool) -> str:
    image = metadata["network_data_format"]["inputs"]["image"]
    own = f"mri-alm {version('mri-alm')}"
    return _CARD.format(
        name=metadata["name"],
        authors=metadata["authors"],
        description=metadata["description"],
        members=len(run.checkpoints),
        together="the largest logit counts" if run.point.folds else "logits averaged",
        names=", ".join(image["channel_def"].values()),
        size=" x ".join(map(str, run.settings["size"])),
        spacing=" x ".join(map(str, run.settings["spacing"])),
        loss=run.settings["loss"],
        preset=run.settings["preset"],
        behind=_behind(run),
        auc=_auc_in_words(metadata["eval_metrics"]),
        point=run.point.in_words(),
        data=f"{label.data_source}\n\n" if label.data_source else "",
        trained=trained_in_words(run.trained_on),
        note=f" **This model was {note}.**" if (note := training_note(run.trained_on)) else "",
        needs=f"It carries the package {own}, in `mri_alm`." if carried else f"It needs {own}, installed.",
        parameters=f"{size:,}",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        references="\n".join(f"- {line}" for line in metadata["references"]),
    )
