"""A threshold.json of somebody else: what it says is what is decided, or it is refused with the field's name."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from shell import WarmPython

from mri_alm.bundle.run_folder import RunFolder
from mri_alm.errors import InputError
from mri_alm.metrics.threshold import OperatingPoint, fixed_fn_threshold
from mri_alm.runtime.files import DamagedFileError

POINT: dict[str, Any] = {
    "threshold": 0.25, "rank": 2, "n_positive": 8, "n_negative": 20, "false_negatives": 1,
    "false_positive_rate": 0.5, "expected_miss_rate": 2 / 9, "miss_rate_upper_95": 0.4707,
    "rule": "at most 1 of 8 held-out positives missed", "basis": "approximate: pooled",
    "checkpoints": {"split_0": "0" * 64, "split_1": "f" * 64},
}  # fmt: skip


def stored(folder: Path, text: str) -> RunFolder:
    folder.mkdir(exist_ok=True)
    (folder / "threshold.json").write_text(text, "utf-8")
    return RunFolder(folder)


def test_a_file_that_is_right_is_read_as_it_stands(tmp_path: Path) -> None:
    point, checkpoints = stored(tmp_path, json.dumps(POINT)).operating_point()
    assert point.to_json() == {name: value for name, value in POINT.items() if name != "checkpoints"}
    assert checkpoints == POINT["checkpoints"]
    everyone = POINT | {"threshold": None, "rank": 0, "false_negatives": 0}
    assert stored(tmp_path, json.dumps(everyone)).operating_point()[0].threshold == -math.inf
    for end in (0, 1, 0.0, 1.0):
        assert stored(tmp_path, json.dumps(POINT | {"threshold": end})).operating_point()[0].threshold == end


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("threshold.json")), ids=lambda path: path.parent.name)
def test_every_threshold_that_ships_is_read(path: Path) -> None:
    point, checkpoints = RunFolder(path.parent).operating_point()
    assert point.to_json() | {"checkpoints": checkpoints} == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        *(("threshold", value, "a finite number from 0 to 1") for value in (2.0, -0.1, "0.5", True, [0.5], {}, -1)),
        ("threshold", None, "null exactly where rank is 0 (rank is 2)"),
        ("rank", 0, "null exactly where rank is 0 (rank is 0)"),
        *(("rank", value, "a whole number from 0 to 8") for value in (9, -1, 2.0, "2", True, None)),
        *(("n_positive", value, "a whole number from 0 on") for value in (-1, 8.5, "8", False)),
        ("n_negative", "many", "a whole number from 0 on"),
        *(("false_negatives", value, "a whole number from 0 to 1") for value in (2, -1, 0.5, [])),
        *(
            (name, value, "a finite number from 0 to 1")
            for name in ("false_positive_rate", "expected_miss_rate", "miss_rate_upper_95")
            for value in (1.01, -0.01, "0.5", True, None)
        ),
        *(
            (name, value, "a text of 1 to 300 printable characters")
            for name in ("rule", "basis")
            for value in ("", "x" * 301, "a\x1b[2J", "a\nb", "\u202ea", 7, None, ["x"])
        ),
    ],
)
def test_a_value_that_no_threshold_has_is_refused_by_its_name(
    tmp_path: Path, field: str, value: object, wanted: str
) -> None:
    run = stored(tmp_path, json.dumps(POINT | {field: value}))
    named = "threshold" if "null exactly" in wanted else field
    found = json.dumps((POINT | {field: value})[named])
    found = found if len(found) <= 60 else found[:57] + "..."
    message = f"{run.threshold}: {named} must be {wanted}, found {found}. Restore the file from a copy."
    with pytest.raises(DamagedFileError, match=f"^{re.escape(message)}$"):
        run.operating_point()


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999", "-1e400"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, token: str) -> None:
    run = stored(tmp_path, json.dumps(POINT).replace("0.25", token))
    with pytest.raises(DamagedFileError, match=rf"threshold\.json is damaged \({token} is no number of JSON"):
        run.operating_point()


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ({}, "checkpoints must be an object with at least one split, found {}"),
        ([], "checkpoints must be an object, found []"),
        (None, "checkpoints must be an object, found null"),
        ({"split_0": "0" * 63}, "checkpoints: split_0 must be 64 hexadecimal digits"),
        ({"split_0": "G" * 64}, "checkpoints: split_0 must be 64 hexadecimal digits"),
        ({"split_0": 7}, "checkpoints: split_0 must be 64 hexadecimal digits, found 7"),
        ({"..": "0" * 64}, "names a checkpoint outside the folder: .."),
        ({"split_0/../x": "0" * 64}, "names a checkpoint outside the folder: split_0/../x"),
    ],
)
def test_checkpoints_are_digests_of_splits(tmp_path: Path, checkpoints: object, message: str) -> None:
    run = stored(tmp_path, json.dumps(POINT | {"checkpoints": checkpoints}))
    with pytest.raises(InputError, match=re.escape(message).replace("checkpoints:", ".*checkpoints:")) as error:
        run.operating_point()
    assert str(error.value).startswith(str(run.threshold))


@pytest.mark.parametrize("change", [{"more": 1}, {"rank": ...}, {"checkpoints": ...}])
def test_other_fields_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    fields = {name: value for name, value in (POINT | change).items() if value is not ...}
    with pytest.raises(InputError, match=r"An operating point has the fields|checkpoints must be an object, found no"):
        stored(tmp_path, json.dumps(fields)).operating_point()


def test_points_on_other_scores_are_made_and_decide_as_before() -> None:
    point = fixed_fn_threshold([1, 1, 0], [-3.5, 7.0, 2.0], 0)
    assert point.threshold == pytest.approx(-3.50035, rel=1e-12)
    assert point.decide([-3.6, -3.5]).tolist() == [False, True]
    with pytest.raises(
        DamagedFileError, match=r"x\.json: threshold must be a finite number from 0 to 1, found -3\.50035"
    ):
        OperatingPoint.from_json(point.to_json(), "x.json")


@pytest.mark.slow
def test_scoring_refuses_it_from_the_shell(tmp_path: Path, python: WarmPython) -> None:
    run = Path(shutil.copytree(ROOT / "tests" / "bundle" / "made_before" / "bundle", tmp_path / "run"))
    fields = json.loads((run / "threshold.json").read_text())
    (run / "threshold.json").write_text(json.dumps(fields | {"threshold": 2.0}))
    done = python.run("pipelines/score.py", "--model", run, "--input", tmp_path, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert f"{run}/threshold.json: threshold must be a finite number from 0 to 1, found 2.0." in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "scores.csv").exists()
