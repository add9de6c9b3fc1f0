"""A finished run as a bundle of MONAI's model zoo: configs, weights as safetensors, metadata, a card, a licence.

What could point to patients or to this machine stays behind: names of exams, the manifest, folders.
"""

from collections.abc import Mapping
from copy import deepcopy
from importlib.metadata import version
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

{description}

**Research only. Not a medical device; not to be used for a decision about a patient.**{note}

| | |
|---|---|
| members | {members} networks, {together}, then the sigmoid |
| input | {channels} channels ({names}), {size} voxels of {spacing} mm |
| loss | `{loss}`, multipliers with preset `{preset}` |
| held-out positives behind the threshold | {positives} |
| test AUC | {auc} |
| trained on | {trained} |

{point}

## Use

It needs the package `mri-alm` {version}. From this folder:

    python -m monai.bundle run --config_file configs/inference.json --input DICOM_FOLDER_OR_MANIFEST.csv --output OUT

or from a checkout of mri-alm: `python pipelines/score.py --model THIS_FOLDER --input ... --output OUT`.
`models/*.safetensors` hold the members; `models/model.pt` holds the same weights for MONAI's own programs, which read
no safetensors. Look at what the configs run before you run them: `python pipelines/inspect_bundle.py THIS_FOLDER`.

The threshold was set on the training cohort. At another hospital set one on a calibration cohort of your own
(`--calibration`, `--labels`). Nothing here names the exams of the training cohort, so that yours are others is yours to
know.
"""


def export_bundle(run: TrainedRun, output: Path, *, licence: Path) -> None:
    """Write a bundle of a finished run; it is meant to be shared: everybody may read it, whatever the umask.

    Args:
        run: What to share.
        output: Folder to write, new or empty.
        licence: The project's ``LICENSE``.

    Raises:
        InputError: If the folder is not empty or cannot be written, or the run cannot be read.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise InputError(f"{output} is not empty. Give a new folder: files of another model must not stay in a bundle.")
    with write_atomically(output) as part:
        _write(run, part, licence)
        for path in (part, *part.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def _write(run: TrainedRun, output: Path, licence: Path) -> None:
    """All files of :func:`export_bundle`."""
    members = run.ensemble().members
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
    metadata = _metadata(read_json(configs_folder() / "metadata.json"), run)
    write_json(output / "configs" / "metadata.json", metadata)
    write_bytes(output / "docs" / "README.md", _card(metadata, run).encode())
    write_bytes(output / "LICENSE", licence.read_bytes())


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
    packages = {name: version(name) for name in ("mri-alm", "safetensors", *metadata["required_packages_version"])}
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


def _metrics(run: TrainedRun) -> dict[str, float]:
    test = read_json(run.run.metrics).get("test") if run.run.metrics.is_file() else None
    return {"test_auc": test["ensemble_auc"]} if test else {}


def _card(metadata: dict[str, Any], run: TrainedRun) -> str:
    image = metadata["network_data_format"]["inputs"]["image"]
    return _CARD.format(
        name=metadata["name"],
        description=metadata["description"],
        members=len(run.checkpoints),
        together="the largest logit counts" if run.point.folds else "logits averaged",
        channels=image["num_channels"],
        names=", ".join(image["channel_def"].values()),
        size=" x ".join(map(str, run.settings["size"])),
        spacing=" x ".join(map(str, run.settings["spacing"])),
        loss=run.settings["loss"],
        preset=run.settings["preset"],
        positives=run.point.n_positive,
        auc=metadata["eval_metrics"].get("test_auc", "no test cohort"),
        point=run.point.in_words(),
        trained=trained_in_words(run.trained_on),
        note=f" **This model was {note}.**" if (note := training_note(run.trained_on)) else "",
        version=version("mri-alm"),
    )
