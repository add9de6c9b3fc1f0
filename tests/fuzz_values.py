"""Wrong numbers in sound DICOM exams: b-values, places, voxels; the other half of tests/fuzz_damages.py."""

import numpy as np
from fuzz_damages import again, damage, move, normal_of, pick_part, pick_volume, points_of
from fuzz_exams import Exam, Picture, tell_b
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence


def _scale(exam: Exam, rng: np.random.Generator) -> list[Picture]:
    """All images of one b-value that is not the only clue to its scale: with a map, or among three others."""
    b = float(rng.choice(exam.b_values))
    return exam.of("dwi", b) if "adc" in exam.parts() or len(exam.b_values) > 3 else []


# ---- b-values


@damage("b-value|b = ")
def private_groups_stripped(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.pictures:
        one.ds.remove_private_tags()
    return not exam.enhanced


@damage("b-value|b = ")
def private_block_moved(exam: Exam, rng: np.random.Generator) -> bool:
    """A PACS owns block 10, or has taken the vendor's element numbers in it."""
    alone = rng.random() < 0.3
    for one in exam.of("dwi") + exam.of("calculated"):
        private = [element for element in one.ds if element.tag.is_private]
        for element in private:
            group, number = element.tag.group, element.tag.element
            one.ds.add_new((group, 0x0010), "LO", "ACME PACS 1.0")
            if number == 0x0010 and not alone:
                one.ds.add_new((group, 0x0011), "LO", element.value)
            elif number != 0x0010:
                if not alone:
                    one.ds.add_new((group, number + 0x100), element.VR, element.value)
                one.ds[group, number].value = [7, 7] if element.VM > 1 and element.VR == "IS" else element.value
                if element.VM == 1:
                    one.ds.add_new((group, number), "LO", "7")
    return any(element.tag.is_private for one in exam.of("dwi") for element in one.ds)


def _set_b(one: Picture, vendor: str, b: float) -> None:
    """Say another b-value than the image has."""
    sequence = one.ds.get("SequenceName")
    directions = {"1": (1.0, 0.0, 0.0), "2": (0.0, 1.0, 0.0), "3": (0.0, 0.0, 1.0)}
    tell_b(one.ds, vendor, int(b), directions.get(one.direction))
    if sequence and one.direction:
        one.ds.SequenceName = f"*ep_b{int(b)}#{one.direction}"


@damage("b-value|b = |slice|position")
def b_of_one_slice_changes(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng, "dwi")[5]
    _set_b(one, exam.vendor, rng.choice([value for value in (*exam.b_values, 600) if value != one.b]))
    return True


@damage("b-value|b = ")
def b_varies_by_5(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.of("dwi"):
        if one.b:
            off = {"": int(rng.choice([-5, 0, 5])) if one.b > 50 else 0, "1": -5, "2": 0, "3": 5}[one.direction]
            _set_b(one, exam.vendor, one.b + off)
    return True


@damage("b-value|b = |ADC")
def one_b_ten_times(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.of("dwi", exam.b_values[-1]):
        _set_b(one, exam.vendor, 10 * exam.b_values[-1])
    return True


@damage("b-value|b = |ADC")
def b_values_change_places(exam: Exam, rng: np.random.Generator) -> bool:
    first, second = rng.choice(exam.b_values, 2, replace=False).tolist()
    if abs(first - second) <= 100 or (min(first, second) > 0 and len(exam.b_values) == 2):
        return False  # 0 and 50, or what one b has no neighbour to tell
    for one in exam.of("dwi"):
        if one.b in (first, second):
            _set_b(one, exam.vendor, second if one.b == first else first)
    return all(not one.direction for one in exam.of("dwi"))


@damage("b-value|b = |ADC")
def all_b_halved_beside_the_map(exam: Exam, rng: np.random.Generator) -> bool:
    for one in exam.of("dwi"):
        _set_b(one, exam.vendor, (one.b or 0) // 2)
    return "adc" in exam.parts()


@damage("calc|b = |ADC")
def calculated_b_with_holes(exam: Exam, rng: np.random.Generator) -> bool:
    """By a vendor's name for it; what is below its noise is zero."""
    if exam.enhanced or "calculated" in exam.parts():
        return False
    added = again(
        exam, [one for one in exam.of("dwi", exam.b_values[-1]) if one.direction in ("", "1")], 64, "calculated"
    )
    b = int(rng.choice([1500, 2000]))
    name = str(rng.choice(["cDWI b1500", "sDWI_b1500", "DWI computed", "ep2d_diff_b1500_CALC", "Synthetic DWI"]))
    exam.clipped = True
    for one in added:
        one.b, one.direction, one.ds.SeriesDescription = b, "", name
        one.ds.ImageType = ["DERIVED", "PRIMARY", "DIFFUSION"]
        _set_b(one, exam.vendor, b)
        one.pixels = (low := exam.anatomies[0].signal(points_of(one), b)) * (low > np.percentile(low, 40))
    return True


@damage("b-value|b = |ADC|left")
def b0_in_a_series_without_b(exam: Exam, rng: np.random.Generator) -> bool:
    images = exam.of("dwi", 0)
    for one in images:
        tell_b(one.ds, exam.vendor, 0, None)
        one.ds.remove_private_tags()
        for name in ("DiffusionBValue", "SequenceName"):
            one.ds.pop(name, None)
    number = int(rng.choice([1, 65]))
    again(exam, images, number)
    exam.remove(*images)
    return bool(images) and not exam.enhanced


@damage("differ|repeat|b = |ADC")
def adc_map_among_the_images_of_the_highest_b(exam: Exam, rng: np.random.Generator) -> bool:
    images = [one for one in exam.of("dwi", exam.b_values[-1]) if one.direction in ("", "1")]
    number = images[0].ds.SeriesNumber
    uid = images[0].ds.SeriesInstanceUID
    for one in again(exam, images, 66, "appended"):
        one.pixels = exam.anatomies[0].adc(points_of(one))
        one.ds.SeriesInstanceUID, one.ds.SeriesNumber = uid, number
    return not exam.enhanced


@damage("differ|repeat|scale|b = |ADC")
def repeat_of_another_gain_or_content(exam: Exam, rng: np.random.Generator) -> bool:
    images = exam.of("dwi", exam.b_values[-1])
    uid, number = images[0].ds.SeriesInstanceUID, images[0].ds.SeriesNumber
    gain = rng.random() < 0.5
    for one in again(exam, images, 67):
        one.pixels = 3 * one.pixels if gain else exam.anatomies[0].other(points_of(one))
        one.ds.SeriesInstanceUID, one.ds.SeriesNumber = uid, number
    return not exam.enhanced


@damage("ADC")
def derived_names_of_ge(exam: Exam, rng: np.random.Generator) -> bool:
    """The map is called otherwise and carries the b-value it was computed from; a b = 0 copy is called T2 weighted."""
    if "adc" not in exam.parts() or exam.vendor != "ge":
        return False
    for one in exam.of("adc"):
        one.ds.SeriesDescription, one.ds.ImageType = "Average DC", ["DERIVED", "SECONDARY", "PROCESSED"]
        tell_b(one.ds, "ge", exam.b_values[-1], None)
    for number, b, name in ((500, exam.b_values[-1], "Isotropic image"), (501, exam.b_values[0], "T2 weighted trace")):
        for one in again(exam, [one for one in exam.of("dwi", b) if one.direction in ("", "1")], number):
            one.ds.SeriesDescription, one.ds.ImageType = name, ["DERIVED", "SECONDARY", "PROCESSED"]
            one.pixels = exam.anatomies[0].signal(points_of(one), b)
            if b == exam.b_values[0]:
                one.ds.remove_private_tags()
    return True


# ---- places

PLACE = r"slice|position|cover|grid|geometr|spacing|direction|orientation|contradicts"


def _map_or_one_b(exam: Exam, rng: np.random.Generator) -> list[Picture]:
    """A series whose place the others of diffusion contradict."""
    if "adc" in exam.parts() and rng.random() < 0.5:
        return exam.of("adc")
    return exam.of("dwi", float(rng.choice(exam.b_values)))


@damage(PLACE)
def one_slice_moves(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[4]
    along, down = np.split(np.array(one.ds.ImageOrientationPatient, float), 2)
    move(one, [along * 6, down * -4, normal_of(one) * 1.0, normal_of(one) * 30][rng.integers(4)])
    return True


@damage(PLACE)
def one_series_moves(exam: Exam, rng: np.random.Generator) -> bool:
    by = [np.array([9.0, 0, 0]), np.array([0, 0, 3.0]), np.array([0, 7.0, 0])][rng.integers(3)]
    for one in _map_or_one_b(exam, rng):
        move(one, by)
    return True


@damage(PLACE)
def a_gap_inside(exam: Exam, rng: np.random.Generator) -> bool:
    for one in pick_volume(exam, rng)[5:]:
        move(one, 1.5 * normal_of(one))
    return True


@damage(PLACE)
def slices_drift_sideways(exam: Exam, rng: np.random.Generator) -> bool:
    for one in pick_volume(exam, rng):
        move(one, one.index * np.array(one.ds.ImageOrientationPatient[:3], float))
    return True


@damage(PLACE)
def one_series_upside_down(exam: Exam, rng: np.random.Generator) -> bool:
    images = _map_or_one_b(exam, rng)
    centre = np.mean([np.array(one.ds.ImagePositionPatient, float) for one in images], axis=0)
    for one in images:
        off = np.array(one.ds.ImagePositionPatient, float) - centre
        move(one, -2 * off)
    # Two b-values alone do not tell which of them is upside down.
    told = "adc" in exam.parts() or len(exam.b_values) > 3
    return told and not exam.enhanced and not any(one.direction for one in images)


@damage(PLACE)
def rows_run_the_other_way(exam: Exam, rng: np.random.Generator) -> bool:
    images = _map_or_one_b(exam, rng) if rng.random() < 0.5 else [pick_volume(exam, rng)[5]]
    for one in images:
        cosines = np.array(one.ds.ImageOrientationPatient, float)
        one.ds.ImageOrientationPatient = (cosines * np.repeat([-1, 1], 3)).tolist()
    return True


@damage(PLACE)
def rows_and_columns_change_places(exam: Exam, rng: np.random.Generator) -> bool:
    images = _map_or_one_b(exam, rng) if rng.random() < 0.5 else [pick_volume(exam, rng)[5]]
    for one in images:
        cosines = list(one.ds.ImageOrientationPatient)
        one.ds.ImageOrientationPatient = cosines[3:] + cosines[:3]
    return True


@damage(PLACE)
def pixels_of_another_size(exam: Exam, rng: np.random.Generator) -> bool:
    images = _map_or_one_b(exam, rng) if rng.random() < 0.5 else [pick_volume(exam, rng)[5]]
    for one in images:
        one.ds.PixelSpacing = [2 * float(v) for v in one.ds.PixelSpacing]
    return True


@damage("cover|field of view")
def narrow_field_of_view_of_diffusion(exam: Exam, rng: np.random.Generator) -> bool:
    """Sound: the left part alone was scanned."""
    for part in ("dwi", "adc", "calculated"):
        for one in exam.of(part):
            one.pixels = one.pixels[:, :20]
    return True


# ---- voxels

VALUE = r"ADC|scale|slope|differ|repeat|b = "


@damage(VALUE)
def slope_of_the_map_lost(exam: Exam, rng: np.random.Generator) -> bool:
    """Stored in steps of 0.4e-6 mm2/s."""
    for one in exam.of("adc"):
        one.pixels = one.pixels * 2.5
        one.ds.pop("RescaleSlope", None)
        one.ds.pop("RescaleIntercept", None)
    return "adc" in exam.parts()


@damage(VALUE)
def slope_of_the_map_elsewhere(exam: Exam, rng: np.random.Generator) -> bool:
    """RealWorldValueMappingSequence has it."""
    for one in exam.of("adc"):
        one.pixels = one.pixels * 2.5
        inner = Dataset()
        inner.RealWorldValueSlope = 0.4 * float(one.ds.get("RescaleSlope", 1.0))
        inner.RealWorldValueIntercept = 0.0
        inner.RealWorldValueFirstValueMapped, inner.RealWorldValueLastValueMapped = 0, 65535
        one.ds.RealWorldValueMappingSequence = Sequence([inner])
        one.ds.pop("RescaleSlope", None)
        one.ds.pop("RescaleIntercept", None)
    return "adc" in exam.parts() and not exam.enhanced


@damage(VALUE)
def slope_changes(exam: Exam, rng: np.random.Generator) -> bool:
    images = _scale(exam, rng) if rng.random() < 0.5 else exam.of("adc")
    for one in images:
        one.ds.RescaleSlope = 2.5 * float(one.ds.get("RescaleSlope", 1.0))
        one.ds.RescaleIntercept = 0.0
    return bool(images)


@damage(VALUE)
def intercept_appears(exam: Exam, rng: np.random.Generator) -> bool:
    images = _scale(exam, rng) if rng.random() < 0.5 else exam.of("adc")
    for one in images:
        one.ds.RescaleSlope = one.ds.get("RescaleSlope", 1.0)
        one.ds.RescaleIntercept = 1000.0 * float(one.ds.RescaleSlope)
    return bool(images)


@damage(VALUE + "|slice")
def slope_of_one_slice_changes(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[4]
    one.ds.RescaleSlope, one.ds.RescaleIntercept = 2.5 * float(one.ds.get("RescaleSlope", 1.0)), 0.0
    return True


@damage(VALUE + "|negative|sign")
def sign_of_the_map_lost(exam: Exam, rng: np.random.Generator) -> bool:
    """Some voxels of the map were below zero, and the header calls all of them unsigned."""
    for one in exam.of("adc"):
        values = one.pixels
        values[rng.random(values.shape) < 0.05] = 65536 - 30
        one.pixels = values
    return "adc" in exam.parts()


@damage("MONOCHROME1|invert")
def shown_inverted(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    top = max(one.pixels.max() for one in exam.of(part))
    for one in exam.of(part):
        one.pixels = top - one.pixels
        one.ds.PhotometricInterpretation = "MONOCHROME1"
    return True


@damage("bit")
def fewer_bits_are_stored_than_used(exam: Exam, rng: np.random.Generator) -> bool:
    part = pick_part(exam, rng)
    for one in exam.of(part):
        one.ds.BitsStored, one.ds.HighBit = 10, 9
    return True


@damage("zero|empty|masked|share|voxel|ADC")
def hole_in_one_image(exam: Exam, rng: np.random.Generator) -> bool:
    """Zeros about the middle: of the map, of one b-value, of T2."""
    images = exam.of(pick_part(exam, rng))
    if images[0].part == "dwi":
        images = exam.of("dwi", float(rng.choice(exam.b_values)))
    exam.hole = np.mean([points_of(one).mean((0, 1)) for one in images], axis=0)
    for one in images:
        outside = np.linalg.norm(points_of(one) - exam.hole, axis=-1) > exam.radius
        one.pixels = one.pixels * outside
    return True


@damage(VALUE + "|place")
def map_and_highest_b_change_content(exam: Exam, rng: np.random.Generator) -> bool:
    high = [one for one in exam.of("dwi", exam.b_values[-1]) if one.direction in ("", "1")]
    if "adc" not in exam.parts() or exam.enhanced:
        return False
    if len(high) != len(exam.of("adc")):  # another damage took slices
        return False
    for one, other in zip(high, exam.of("adc"), strict=True):
        one.pixels, other.pixels = other.pixels, one.pixels
    return all(one.direction == "" for one in high)


@damage("syntax|deflated|implicit")
def another_transfer_syntax(exam: Exam, rng: np.random.Generator) -> bool:
    exam.syntax = str(rng.choice(["implicit", "deflated"]))
    return True


@damage("damaged|read")
def pixels_cut_short(exam: Exam, rng: np.random.Generator) -> bool:
    one = pick_volume(exam, rng)[5]
    one.ds.PixelData = one.ds.PixelData[: len(one.ds.PixelData) // 2 // 2 * 2]
    return one.part not in exam.enhanced
