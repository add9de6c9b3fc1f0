"""The one reader of tables: encodings, separators, what spreadsheets do, and what is no table."""

import codecs
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mri_alm.errors import InputError
from mri_alm.runtime.tables import column_name, path_in_cell, read_table, windows_hint, write_csv

ROWS = [{"study": "Köln 01", "label": "1"}, {"study": "a,b", "label": "0"}]


def table(folder: Path, content: bytes | str) -> Path:
    path = folder / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


TEXT = 'study;label\nKöln 01;1\n"a,b";0\n'


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        TEXT.encode("cp1252"),
        TEXT.encode("utf-16"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        TEXT.encode("utf-32"),
        TEXT.replace("\n", "\r\n").encode(),
        TEXT.replace("\n", "\r").encode(),
        f"sep=;\r\n{TEXT}".encode("utf-8-sig"),
        f'"sep=;"\n{TEXT}'.encode("utf-16"),
        f"SEP=|\n{TEXT}".replace(";", "|").replace("SEP=;", "SEP=|").encode(),
        TEXT.replace(";", "\t").encode(),
        'study,label\nKöln 01,1\n"a,b",0\n'.encode(),
        'study, label\nKöln 01, 1\n "a,b", 0\n'.encode(),
        " Study\u00a0; LABEL\u200b\n\u200bKöln 01\u00a0;1\n'a,b;0\n".replace("'a", "a").encode(),
        '"study";"label";\n"Köln 01";"1";\n"a,b";"0";\n;;\n'.encode(),
    ],
    ids=range(18),
)
def test_every_form_of_one_table(tmp_path: Path, content: bytes) -> None:
    assert read_table(table(tmp_path, content), ("study", "label")) == ROWS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("study;size\nA;1,5\nB;2,5\n", [{"study": "A", "size": "1,5"}, {"study": "B", "size": "2,5"}]),
        (
            "study;note, of any length\nA;x\nB;y, z\n",
            [{"study": "A", "note,_of_any_length": "x"}, {"study": "B", "note,_of_any_length": "y, z"}],
        ),
        ("study\n0012\n", [{"study": "0012"}]),
        ('study,label\n="0012",1\n"=""0013""",0\n', [{"study": "0012", "label": "1"}, {"study": "0013", "label": "0"}]),
        ('study,note\nA,"two\nlines"\n', [{"study": "A", "note": "two\nlines"}]),
        ("study,a,b\nA,1\nB,0,x\n", [{"study": "A", "a": "1", "b": ""}, {"study": "B", "a": "0", "b": "x"}]),
        (",study\n0,A\n1,B\n", [{"study": "A"}, {"study": "B"}]),
    ],
)  # fmt: skip
def test_the_separator_is_what_fits_the_rows(tmp_path: Path, text: str, expected: list[dict[str, str]]) -> None:
    assert read_table(table(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04rest", r"table\.csv is an Excel workbook \(\.xlsx\).* and no CSV text\. Open it, save it as CSV"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", r"is an Excel workbook \(\.xls\), and no CSV text"),
        (b"\n<html><table>", "is a web page or XML, as some systems name .xls"),
        (b"%PDF-1.4", "is a PDF"),
        (b"\x1f\x8b\x08", "is packed by gzip"),
        (b"version https://git-lfs.github.com", "is a pointer of Git LFS"),
        (b"study,label\nA,1\nB\0,0\n", "line 3 holds zero bytes"),
        (b"study\n\x81\xff\n", "is no text in UTF-8, UTF-16 or Windows-1252"),
        ("study,label\n".encode("utf-16") + b"x", "is no text in UTF-8, UTF-16 or Windows-1252, or is damaged"),
        ("study,label\nSmith, John,1\n", r"row 2 has more cells than the header has names \(2\)"),
        ("study,label,\nA,1,\nB,1,0\n", "row 3 has more cells than the header has names"),
        ('study,label\nA,1\n"B,0\nC,1\n', r"row 2 or the one after it cannot be read \(unexpected end of data\)"),
        ('study,label,note\nA,1,"x\nB,0,y\nC,1,z"\nD,0,\n', "goes over several lines and holds what looks like rows"),
        ('study,label\n"A"x,1\n', "cannot be read .* most likely for a quotation mark that is not closed"),
        ("Label,study,label \nA,1,0\n", 'column "label" stands twice'),
        ("", "has no row below a header"),
        ("\n\nstudy,label\nA,1\n", "its first row is empty"),
        ("study,label\n,\n", "has a header but no row below it"),
    ],
)
def test_what_cannot_be_read_right_is_refused(tmp_path: Path, content: bytes | str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_table(table(tmp_path, content))


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")))


@settings(max_examples=25)
@given(st.lists(st.tuples(NAMES, st.floats(allow_nan=False)), min_size=1))
def test_what_we_write_reads_back_equal(rows: list[tuple[str, float]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.csv"
        write_csv(path, ("study", "score"), [{"study": f"s{name}", "score": score} for name, score in rows])
        found = [(row["study"], float(row["score"])) for row in read_table(path)]
    assert found == [(f"s{name}", score) for name, score in rows]


@pytest.mark.parametrize("name", ["Study ID", "study-id", " STUDY\u00a0ID\ufeff", "ｓtudy_id"])
def test_column_names_are_compared_in_one_form(name: str) -> None:
    assert column_name(name) == "study_id"


def test_a_path_in_a_cell_as_windows_and_macs_write_it(tmp_path: Path) -> None:
    file = tmp_path / "Mu\u0308nster" / "t2.nii"
    file.parent.mkdir()
    file.touch()
    for cell in ("Mu\u0308nster/t2.nii", "M\u00fcnster/t2.nii", "M\u00fcnster\\t2.nii", ".\\Mu\u0308nster\\t2.nii"):
        found = path_in_cell(tmp_path, cell)
        assert found.samefile(file)
        assert not windows_hint(found)
    assert path_in_cell(tmp_path, str(file)) == file


@pytest.mark.parametrize("cell", ["C:\\x\\t2.nii", "\\\\host\\share\\t2.nii", "\\x\\t2.nii", "C:t2.nii"])
def test_a_path_from_the_root_of_another_machine_is_not_searched_by_its_last_part(tmp_path: Path, cell: str) -> None:
    (tmp_path / "t2.nii").touch()
    found = path_in_cell(tmp_path, cell)
    assert not found.exists()
    assert "Windows machine" in windows_hint(found)
