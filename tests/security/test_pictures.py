"""Pictures beside scores that are not what their names say: a warning that names the study, and the report goes on."""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from evaluation_inputs import labels, scores, write_rows
from PIL import Image, PngImagePlugin
from programs import load_program

from mri_alm.evaluation.report import pictures_beside

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(touched) (w) file closefile\nshowpage\n%%EOF\n"


def png(width: int = 30, height: int = 20, *, texts: int = 0, claimed: tuple[int, int] | None = None) -> bytes:
    """A picture; with texts of a megabyte each, or a header that claims more pixels."""
    info, buffer = PngImagePlugin.PngInfo(), io.BytesIO()
    for number in range(texts):
        info.add_text(f"text{number}", "x" * (1 << 20), zip=True)
    Image.fromarray(np.full((height, width, 3), 200, np.uint8)).save(buffer, "PNG", pnginfo=info)
    content = buffer.getvalue()
    if claimed:
        head = b"IHDR" + struct.pack(">II", *claimed) + content[24:29]
        content = content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]
    return content


def other(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, kind)
    return buffer.getvalue()


BAD: dict[str, Callable[[], bytes]] = {
    "eps": lambda: EPS,
    "gif": lambda: other("GIF"),
    "tiff": lambda: other("TIFF"),
    "bmp": lambda: other("BMP"),
    "bomb": lambda: png(claimed=(7072, 7072)),  # just above 50 megapixels, below what Pillow warns of
    "pillow's bomb": lambda: png(claimed=(20000, 20000)),
    "text bomb": lambda: png(texts=80),
    "cut short": lambda: png()[:60],
    "empty": lambda: b"",
    "no picture": lambda: b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
}


def test_a_picture_of_either_kind_is_made_small(tmp_path: Path) -> None:
    (tmp_path / "A.png").write_bytes(png(1440, 20))
    (tmp_path / "B").mkdir()
    (tmp_path / "B" / "qc.jpg").write_bytes(other("JPEG"))
    found = pictures_beside(tmp_path, ["A", "B", "C"])
    assert [Image.open(io.BytesIO(picture)).size for picture in found.values()] == [(720, 10), (30, 20)]
    assert list(found) == ["A", "B"]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_no_picture(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.Popen", start)
    (tmp_path / "A.png").write_bytes(BAD[kind]())
    assert pictures_beside(tmp_path, ["A"]) == {"A": b""}


def test_a_picture_of_fifty_megapixels_is_taken(tmp_path: Path) -> None:
    Image.new("L", (5000, 10000)).save(tmp_path / "A.png")
    assert Image.open(io.BytesIO(pictures_beside(tmp_path, ["A"])["A"])).size == (720, 1440)


def test_a_file_of_more_bytes_than_any_picture_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "A.png").open("wb") as file:
        file.write(png())
        file.truncate((64 << 20) + 1)
    assert pictures_beside(tmp_path, ["A"]) == {"A": b""}
    os.truncate(tmp_path / "A.png", 64 << 20)
    assert pictures_beside(tmp_path, ["A"])["A"] != b""


def test_the_report_goes_on_and_names_the_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = labels()
    truth, found = write_rows(tmp_path / "labels.csv", rows), write_rows(tmp_path / "scores.csv", scores(rows, 1))
    (tmp_path / "S000.png").write_bytes(png())
    (tmp_path / "S001.png").write_bytes(EPS)
    os.mkfifo(tmp_path / "S002.png")
    (tmp_path / "S003.png").symlink_to("/dev/zero")
    (tmp_path / "S004.png").write_bytes(BAD["bomb"]())
    words = ["--scores", str(found), "--labels", str(truth), "--output", str(tmp_path / "out"), "--draws", "100"]
    assert load_program("evaluate").main(words) == 0
    expected = "No picture of S001, S002, S004: the file is no PNG or JPEG, is damaged, or has more than 50 megapixels"
    (warning,) = [w for w in json.loads((tmp_path / "out" / "evaluation.json").read_text())["warnings"] if "pict" in w]
    assert warning.startswith(expected)
    assert f"warning: {expected}" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert expected in page
    assert page.count("data:image/jpeg;base64,") == 1
