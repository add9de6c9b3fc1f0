"""The augmentation of the field: what it leaves alone, what it changes by how much, and what it draws from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigParser
from monai.transforms import Compose, RandAffined, RandFlipd, RandomizableTransform, RandScaleIntensityd, RandZoomd
from small_cohort import workflow
from torch import Tensor

PART = Path(__file__).parents[2] / "configs" / "parts" / "augmentation.json"
SIZE, SPACING = [20, 20, 12], [2.8, 2.8, 3.0]
SPATIAL = (RandAffined, RandFlipd, RandZoomd)


def field(chance: Callable[[Any], float] = lambda one: one.prob, *, until: str = "") -> Compose:
    """The transforms of the part for a small grid, each with another chance, up to one of a name."""
    config = json.loads(PART.read_text("utf-8")) | {"size": SIZE, "spacing": SPACING, "imports": ["$import mri_alm"]}
    steps = ConfigParser(config).get_parsed_content("field")
    names = [getattr(step, "__name__", "") for step in steps]
    steps = steps[: names.index(until) + 1] if until else steps
    for step in steps:
        if isinstance(step, RandomizableTransform):
            step.prob = chance(step)
    return Compose(steps)


def exam() -> Tensor:
    """ADC, high b and T2 as preprocessing leaves them, with nothing seen in a quarter of diffusion and two slices."""
    image = torch.rand(3, *SIZE, generator=torch.Generator().manual_seed(1)) + 0.05
    image[0] *= 0.9
    image[1:, :, :, :] -= image[1:].mean((1, 2, 3), keepdim=True)
    image[:2, :5], image[2, :, :, :2] = 0, 0
    return image


def drawn(transform: Compose, image: Tensor, seed: int) -> Tensor:
    transform.set_random_state(seed)
    found = transform({"image": image.clone(), "label": 1.0, "report": {}})
    assert found.keys() == {"image", "label", "report"}
    result: Tensor = torch.as_tensor(found["image"]).as_subclass(torch.Tensor)
    return result


def test_what_an_exam_does_not_show_stays_as_it_is_and_the_rest_is_normalised() -> None:
    image = exam()
    transform = field(lambda one: 0.0 if isinstance(one, SPATIAL) else 1.0)
    for seed in range(5):
        found = drawn(transform, image, seed)
        assert torch.equal(found[1:] != 0, image[1:] != 0)
        assert not found[0][image[1] == 0].any()
        assert 0 <= found[0].min() < found[0].max() <= 1
        for channel in (1, 2):
            inside = found[channel][image[channel] != 0]
            assert inside.mean().item() == pytest.approx(0, abs=1e-4)
            assert inside.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        assert (found - image)[:, 6:, :, 3:].abs().min(dim=0).values.max() > 0.01  # every sequence was changed


def test_masks_move_with_the_exam_and_leave_no_rim() -> None:
    """A constant stays that constant up to the last voxel that was seen, wherever the exam is moved to."""
    image = exam()
    image[0][image[0] != 0] = 0.4
    transform = field(lambda _: 1.0, until="within_masks")
    shares = []
    for seed in range(8):
        transform.set_random_state(seed)
        found = transform({"image": image.clone()})
        adc, seen = found["adc"][0], found["seen"]
        torch.testing.assert_close(adc[seen[0]], torch.full_like(adc[seen[0]], 0.4), rtol=1e-5, atol=0)
        assert not adc[~seen[0]].any()
        shares.append(seen[0].double().mean().item())
    assert len(set(shares)) == 8
    assert all(0.1 < share < 0.9 for share in shares)


@pytest.mark.parametrize("channel", [0, 1, 2])
def test_a_blanked_channel_stays_blank_and_the_others_are_changed(channel: int) -> None:
    image = exam()
    image[channel] = 0
    found = drawn(field(lambda _: 1.0), image, 3)
    assert [bool(one.any()) for one in found] == [number != channel for number in range(3)]


def test_adc_changes_by_a_few_per_cent_only() -> None:
    image = exam()
    image[0][image[0] != 0] = 0.5
    transform = field(lambda one: float(not isinstance(one, SPATIAL)))
    ratios = [drawn(transform, image, seed)[0][8:, 3:-3, 4:-2].median().item() / 0.5 for seed in range(30)]
    assert 0.94 < min(ratios) < 0.97
    assert 1.03 < max(ratios) < 1.06


def test_diffusion_moves_against_t2_by_three_millimetres_along_each_axis_at_most() -> None:
    place = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in SIZE), indexing="ij")
    spot = torch.exp(-sum((axis - n // 2) ** 2 for axis, n in zip(place, SIZE, strict=True)) / 4)
    image = (spot + 1e-3).expand(3, *SIZE).clone()

    def middle(channel: Tensor) -> Tensor:
        weight = channel - channel.median()
        return torch.stack([(axis * weight).sum() / weight.sum() for axis in place])

    transform = field(
        lambda one: float(isinstance(one, RandAffined) and one.keys == ("diffusion",)), until="within_masks"
    )
    moved = []
    for seed in range(40):
        transform.set_random_state(seed)
        found = transform({"image": image.clone()})
        torch.testing.assert_close(middle(found["t2"][0]), middle(image[2]), rtol=0, atol=1e-3)
        torch.testing.assert_close(middle(found["adc"][0]), middle(found["hbv"][0]), rtol=0, atol=1e-2)
        moved.append((middle(found["adc"][0]) - middle(image[0])) * torch.tensor(SPACING))
    most = torch.stack(moved).abs().amax(0)
    assert ((most > 2) & (most < 3.25)).all()


def test_equal_seeds_give_equal_draws() -> None:
    transform, image = field(), exam()
    draws = [drawn(transform, image, seed) for seed in (4, 4, 5, 6, 7)]
    assert torch.equal(draws[0], draws[1])
    assert not any(torch.equal(draws[0], other) for other in draws[2:])


def test_unchanged_exams_are_prepared_as_all_others(manifest: Path, tmp_path: Path) -> None:
    """The cache knows an exam by its deterministic transforms: one more of them, and it would be prepared twice."""
    parser = workflow(manifest, tmp_path, augmentation="unchanged").parser
    training, validation = (parser.get_parsed_content(f"{part}::dataset") for part in ("train", "validate"))
    assert training.transform_hash == validation.transform_hash
    assert not any(isinstance(one, RandomizableTransform) for one in training.transform.transforms)
    other = workflow(manifest, tmp_path, augmentation="field", drop_hbv=0.5).parser
    assert other.get_parsed_content("train::dataset").transform_hash != ""
    steps = other.get_parsed_content("train::augmentation")
    assert [type(step).__name__ for step in steps][-2:] == ["RandLambdad", "EnsureTyped"]
    assert sum(isinstance(step, RandScaleIntensityd) for step in steps) == 1
