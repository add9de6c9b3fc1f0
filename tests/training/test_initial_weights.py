"""A training that begins with the weights of another run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from monai.networks.nets.resnet import ResNet
from small_cohort import train
from torch import nn

from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.errors import InputError
from mri_alm.evaluation.analysis import evaluate
from mri_alm.evaluation.model_card import _known
from mri_alm.networks import ResidualCNN, TwoBranchCNN
from mri_alm.runtime.files import sha256
from mri_alm.training.initial_weights import start_from


def write(path: Path, network: nn.Module) -> Path:
    save_tensors(path, {"model": network.state_dict(), "preset": "default"})
    return path


def test_a_run_begins_with_the_weights_of_another_one(
    manifest: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate of next to nothing keeps them; the network's own draw would be another one."""
    source = trained / "split_1" / "model.pt"
    options = {"splits": 1, "max_epochs": 1, "learning_rate": 1e-30, "init_weights": str(source)}
    run = train(manifest, tmp_path / "run", **options)
    before, after = (load_tensors(path)["model"] for path in (source, run / "split_0" / "model.pt"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-20)
    record = json.loads((run / "split_0" / "split.json").read_text())["initial_weights"]
    assert record == {"sha256": sha256(source), "loaded": sorted(before), "adapted": [], "skipped": []}
    assert f"Initial weights, tensors: loaded {len(before)}, adapted 0, skipped 0." in capsys.readouterr().out
    found = evaluate({"run": run / "scores.csv"}, manifest, run=run, draws=50)
    assert _known(found)["start"] == "Weights of another run where they fit, else random, seed 0."
    assert str(trained) not in json.dumps(found.run.settings)  # type: ignore[union-attr]


def test_what_fits_by_name_and_shape_is_taken_and_the_rest_said(tmp_path: Path) -> None:
    source, network = TwoBranchCNN(features=(2, 4)), TwoBranchCNN(features=(2, 5))
    drawn = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    report = start_from(network, write(tmp_path / "model.pt", source))
    loaded = [f"{path}.0.conv.{kind}" for path in ("diffusion", "t2") for kind in ("bias", "weight")]
    assert (report["loaded"], report["adapted"]) == (sorted([*loaded, "head.bias"]), [])
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name] if name in report["loaded"] else drawn[name])
    assert report["skipped"] == sorted(drawn.keys() - report["loaded"])


def test_a_first_convolution_of_other_channels_is_averaged(tmp_path: Path) -> None:
    """With the same image in every channel its maps are those of the file."""
    source, network = (ResidualCNN(channels, 1, (2, 3), norm=None) for channels in (1, 2))
    report = start_from(network, write(tmp_path / "model.pt", source))
    assert report["adapted"] == ["path.0.conv.weight"]
    assert report["skipped"] == []
    image = torch.randn(2, 1, 8, 8, 4)
    torch.testing.assert_close(network(image.expand(-1, 3, -1, -1, -1)), source(image.expand(-1, 2, -1, -1, -1)))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_the_form_of_medicalnet_fits_monai_s_network(tmp_path: Path, zipped: bool) -> None:
    """Names and form are those that MONAI's own loader of these files takes; the older ones are no zip archives."""
    options = {"spatial_dims": 3, "shortcut_type": "B", "bias_downsample": False, "block_inplanes": (2, 3, 4, 5)}
    source = ResNet("basic", [1, 1, 1, 1], n_input_channels=1, feed_forward=False, **options)
    given = {f"module.{name}": torch.randn_like(tensor.float()) for name, tensor in source.state_dict().items()}
    given |= {name: torch.tensor(7) for name in given if name.endswith("num_batches_tracked")}
    torch.save({"state_dict": given, "epoch": 3}, tmp_path / "resnet.pth", _use_new_zipfile_serialization=zipped)
    network = ResNet("basic", [1, 1, 1, 1], n_input_channels=3, num_classes=1, **options)
    report = start_from(network, tmp_path / "resnet.pth")
    assert (report["adapted"], report["skipped"]) == (["conv1.weight"], ["fc.bias", "fc.weight"])
    source.load_state_dict({name.removeprefix("module."): tensor for name, tensor in given.items()})
    own = network.state_dict()
    for name in report["loaded"]:
        assert torch.equal(own[name], source.state_dict()[name])
    for channel in range(3):
        torch.testing.assert_close(own["conv1.weight"][:, channel], given["module.conv1.weight"][:, 0] / 3)


def test_what_is_no_start_is_refused(tmp_path: Path) -> None:
    network = TwoBranchCNN(features=(2, 4))
    assert start_from(network, None) == {}
    other = write(tmp_path / "other.pt", ResidualCNN(features=(2, 3), norm=None))
    with pytest.raises(InputError, match=r"^Nothing of .*other\.pt fits the network: it has \d+ tensors such"):
        start_from(network, other)
    save_tensors(tmp_path / "none.pt", {"weights": {}})
    with pytest.raises(InputError, match=r"none\.pt holds no weights under the names model or state_dict\."):
        start_from(network, tmp_path / "none.pt")
    network.head.bias.data[0] = torch.nan
    lost = write(tmp_path / "lost.pt", network)
    with pytest.raises(InputError, match=r"lost\.pt: head\.bias holds values that are no finite numbers\."):
        start_from(TwoBranchCNN(features=(2, 4)), lost)


def test_a_file_that_is_not_there_is_refused_before_the_run_folder_is_taken(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    assert "There is no checkpoint nowhere.pt." in refusal(
        train, manifest, tmp_path / "run", splits=1, init_weights="nowhere.pt"
    )
    assert not (tmp_path / "run").exists()
