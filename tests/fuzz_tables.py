"""Exams of NIfTI files, sound and damaged, as tables of image files give them; see tests/fuzz_structure.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nibabel
import numpy as np
from fuzz_damages import Damage
from fuzz_exams import B_VALUES, NOISE, Anatomy, Array, Grid

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(eq=False)
class File:
    """One NIfTI file to be: ``array`` (slices, rows, columns) or, of diffusion, (b-values, slices, rows, columns)."""

    array: Array
    grid: Grid
    dtype: str = "float32"
    qform: Array | None = None  # otherwise the grid's
    sform: Array | None = None
    codes: tuple[int, int] = (1, 1)
    slope: float = 1.0
    gzip_inside: bool = True

    @property
    def affine(self) -> Array:
        """Voxel (column, row, slice) -> RAS millimetres."""
        affine = np.eye(4)
        affine[:3, :3], affine[:3, 3] = self.grid.axes[::-1].T, self.grid.origin
        return LPS_TO_RAS @ affine


@dataclass(eq=False)
class Table:
    """One row of a table: files by column, b-values as their file says them.

    Args:
        b_values: In truth; of a calculated or single high-b image the one.
        hole: As :class:`fuzz_exams.Exam`.
    """

    anatomies: list[Anatomy]
    b_values: tuple[int, ...]
    files: dict[str, File] = field(default_factory=dict)
    bval: str = ""
    hole: Array | None = None
    radius: float = 12.0
    clipped: bool = False

    @property
    def known(self) -> list[float]:
        return [float(b) for b in self.b_values if b]


TableChange = Callable[[Table, np.random.Generator], bool]


def sound_table(rng: np.random.Generator) -> Table:
    """T2, ADC and high b; or T2 and 4D diffusion, sometimes with an ADC map."""
    anatomy, b_values = Anatomy(int(rng.integers(1 << 30))), B_VALUES[rng.integers(len(B_VALUES))]
    tilt = float(rng.choice([0.0, 0.15]))
    plane = (1.0, 0.0, 0.0, 0.0, float(np.cos(tilt)), float(-np.sin(tilt)))
    x, y, z = rng.uniform(-30, 30, 3).tolist()
    t2 = Grid((10, 64, 64), (1.5, 1.5, 3.0), plane, (x, y, z))
    dwi = Grid((10, 32, 32), (3.0, 3.0, 3.0), plane, (x, y, z + float(rng.choice([0.0, 1.5]))))
    table = Table([anatomy], b_values)
    table.files["t2"] = File(anatomy.t2(t2.points), t2, str(rng.choice(["int16", "float32"])))
    if rng.random() < 0.5:
        table.b_values = (int(rng.choice([800, 1400])),)
        table.files["hbv"] = File(_signal(table, dwi, table.b_values[0], rng), dwi)
    else:
        table.files["dwi"] = File(np.stack([_signal(table, dwi, b, rng) for b in b_values]), dwi)
        table.bval = " ".join(map(str, b_values))
    if "hbv" in table.files or rng.random() < 0.5:
        table.files["adc"] = File(anatomy.adc(dwi.points) + rng.normal(size=dwi.shape) * 8, dwi)
    return table


def _signal(table: Table, grid: Grid, b: float, rng: np.random.Generator) -> Array:
    return table.anatomies[0].signal(grid.points, b) + rng.normal(size=grid.shape) * NOISE * 1900


def write_table(table: Table, folder: Path) -> dict[str, str]:
    """Write the files; gives the row."""
    folder.mkdir(parents=True)
    row = {}
    for column, one in table.files.items():
        stored = (one.array / one.slope).T  # columns first, b-values last
        image = nibabel.Nifti1Image(stored.astype(one.dtype), None)
        image.header.set_data_dtype(one.dtype)
        image.set_qform(one.affine if one.qform is None else one.qform, one.codes[0])
        image.set_sform(one.affine if one.sform is None else one.sform, one.codes[1])
        image.header.set_slope_inter(one.slope, 0)
        path = folder / f"{column}.nii.gz"
        if one.gzip_inside:
            nibabel.save(image, path)
        else:
            path.write_bytes(image.to_bytes())
        row[column] = str(path)
    if table.bval:
        (folder / "dwi.bval").write_text(table.bval)
    return row


TABLE_DAMAGES: dict[str, Damage] = {}


def table_damage(named: str) -> Callable[[TableChange], TableChange]:
    """Put a damage into the table of those of NIfTI files."""

    def register(change: TableChange) -> TableChange:
        TABLE_DAMAGES[f"nifti: {change.__name__}"] = Damage(change, named)  # type: ignore[arg-type]
        return change

    return register


def _pick(table: Table, rng: np.random.Generator) -> File:
    return table.files[str(rng.choice(list(table.files)))]


def _diffusion(table: Table, rng: np.random.Generator) -> File:
    return table.files[str(rng.choice([name for name in table.files if name != "t2"]))]


@table_damage("NaN|no number|finite")
def voxels_are_no_numbers(table: Table, rng: np.random.Generator) -> bool:
    one = _diffusion(table, rng)
    if one.array.ndim != 4:  # scanners blank their maps where they trust them not: nobody can tell
        return False
    table.hole = np.array(one.grid.centre)
    ball = np.linalg.norm(one.grid.points - table.hole, axis=-1) < table.radius
    one.array = np.where(ball, rng.choice([np.nan, np.inf]), one.array)
    return True


@table_damage("zero|ADC|masked|signal")
def hole_of_zeros(table: Table, rng: np.random.Generator) -> bool:
    one = _diffusion(table, rng)
    table.hole = np.array(one.grid.centre)
    ball = np.linalg.norm(one.grid.points - table.hole, axis=-1) < table.radius
    if one.array.ndim == 4:
        one.array[int(rng.integers(len(one.array)))][ball] = 0
    else:
        one.array = np.where(ball, 0, one.array)
    return True


@table_damage("where|position|orientation|form|0, 0, 0")
def affines_lost(table: Table, rng: np.random.Generator) -> bool:
    for one in table.files.values() if rng.random() < 0.5 else [_pick(table, rng)]:
        one.codes = (0, 0)
        if rng.random() < 0.5:
            one.qform = one.sform = np.diag([-one.grid.spacing[1], -one.grid.spacing[0], one.grid.spacing[2], 1.0])
    return True


@table_damage("qform|sform")
def sform_contradicts_qform(table: Table, rng: np.random.Generator) -> bool:
    one = _diffusion(table, rng)
    moved = one.affine.copy()
    moved[:3, 3] += rng.choice([[12, 0, 0], [0, -9, 0], [0, 0, 6]])
    one.qform, one.sform = (moved, None) if rng.random() < 0.5 else (None, moved)
    return True


@table_damage("perpendicular|shear")
def sform_sheared(table: Table, rng: np.random.Generator) -> bool:
    one = _pick(table, rng)
    sheared = one.affine.copy()
    sheared[0, 1] += 0.1 * one.grid.spacing[0]
    one.sform, one.codes = sheared, (0, 2)
    return True


@table_damage("b-value|bval|b = ")
def b_values_are_too_few_or_many(table: Table, rng: np.random.Generator) -> bool:
    table.bval = table.bval + " 800" if rng.random() < 0.5 else table.bval.rpartition(" ")[0]
    return "dwi" in table.files


@table_damage("b-value|bval|b = |falls|ADC")
def b_values_in_another_order(table: Table, rng: np.random.Generator) -> bool:
    table.bval = " ".join(reversed(table.bval.split()))
    return "dwi" in table.files


@table_damage("b-value|bval|b = ")
def b_values_in_other_units(table: Table, rng: np.random.Generator) -> bool:
    table.bval = " ".join(f"{float(b) / 1000:g}" for b in table.bval.split())
    return "dwi" in table.files


@table_damage("b-value|bval|b = ")
def b_values_jitter(table: Table, rng: np.random.Generator) -> bool:
    table.bval = str(rng.choice([" ", "\n", "\t", ", "])).join(
        f"{float(b) + (rng.choice([-4, 0, 3.5]) if float(b) > 0 else 0):.2f}" for b in table.bval.split()
    )
    return "dwi" in table.files


@table_damage("differ|repeat|b = |volume")
def map_appended_to_diffusion(table: Table, rng: np.random.Generator) -> bool:
    if "dwi" not in table.files:
        return False
    one = table.files["dwi"]
    one.array = np.concatenate([one.array, table.anatomies[0].adc(one.grid.points)[None]])
    table.bval += f" {table.b_values[-1]}"
    return True


@table_damage("ADC|scale|slope")
def slope_of_the_map_lost_beside_diffusion(table: Table, rng: np.random.Generator) -> bool:
    if not {"dwi", "adc"} <= table.files.keys():
        return False
    table.files["adc"].array = table.files["adc"].array * 2.5
    return True


@table_damage("")
def slope_in_the_header(table: Table, rng: np.random.Generator) -> bool:
    """Sound."""
    one = _pick(table, rng)
    one.dtype, one.slope = "int16", 0.5
    return True


@table_damage("place|swap|exchange")
def columns_change_places(table: Table, rng: np.random.Generator) -> bool:
    if "hbv" not in table.files:
        return False
    table.files["adc"], table.files["hbv"] = table.files["hbv"], table.files["adc"]
    return True


@table_damage("same")
def one_map_in_both_columns(table: Table, rng: np.random.Generator) -> bool:
    if "hbv" not in table.files:
        return False
    first, second = rng.permutation(["adc", "hbv"]).tolist()
    table.files[first] = table.files[second]
    return True


@table_damage("gzip")
def no_gzip_inside(table: Table, rng: np.random.Generator) -> bool:
    for one in table.files.values():
        one.gzip_inside = False
    return True


@table_damage("slice|cover|grid")
def slices_lost(table: Table, rng: np.random.Generator) -> bool:
    """The grid says so: sound, with less of the tissue."""
    one = _diffusion(table, rng)
    rows, columns = one.grid.shape[1:]
    x, y, z = np.array(one.grid.centre) + one.grid.axes[0]
    one.array = one.array[..., 2:, :, :]
    one.grid = Grid((8, rows, columns), one.grid.spacing, one.grid.orientation, (float(x), float(y), float(z)))
    return True


@table_damage("cut off|highest|maximum")
def values_cut_off(table: Table, rng: np.random.Generator) -> bool:
    one = table.files["adc"] if "adc" in table.files else table.files["dwi"]
    one.array = np.minimum(one.array, np.quantile(one.array, 0.7))
    return True


@table_damage("ADC|patient|exam")
def map_of_another_exam_beside_diffusion(table: Table, rng: np.random.Generator) -> bool:
    if not {"dwi", "adc"} <= table.files.keys():
        return False
    one = table.files["adc"]
    one.array = Anatomy(int(rng.integers(1 << 30))).adc(one.grid.points)
    return True
