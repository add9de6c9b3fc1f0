"""Names that would act on a terminal are written out, wherever they leave; progress bars still move."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from evaluation_inputs import labels, scores, write_rows

from mri_alm.runtime.console import harmless

HOSTILE = "a\x1b[2J\rb\x07\x9b1m\u202egnp\u2066"
WRITTEN = r"a\x1b[2J\rb\x07\x9b1m\u202egnp\u2066"


def test_what_acts_is_written_out_and_the_rest_is_not_touched() -> None:
    assert harmless(HOSTILE) == WRITTEN
    assert harmless("Zürich\t日\n5 µm\u200d") == "Zürich\t日\n5 µm\u200d"
    acting = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    for code in acting:
        kept = chr(code) in "\n\t"
        assert (harmless(chr(code)) == chr(code)) == kept
        assert harmless(chr(code)).isascii()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    start = "from mri_alm.runtime.console import tolerate_any_letter\ntolerate_any_letter(); tolerate_any_letter()\n"
    start += f"NAME = {HOSTILE!r}\n"
    settings = os.environ | {"PYTHONIOENCODING": "utf-8"} | environment
    return subprocess.run(
        [sys.executable, "-c", start + code], cwd=ROOT, env=settings, capture_output=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("code", "stream"),
    [
        ("print(NAME)", "stdout"),
        ("import sys; sys.stderr.write(NAME)", "stderr"),
        ("import sys; sys.stdout.writelines([NAME, NAME])", "stdout"),
        ("import argparse; argparse.ArgumentParser().parse_args([NAME])", "stderr"),
        ("import warnings; warnings.warn(NAME)", "stderr"),
        ("import logging; logging.warning('x %s', NAME)", "stderr"),
        ("raise ValueError(NAME)", "stderr"),
        ("import logging.config as c; c.fileConfig('configs/logging.conf')\n"
         "import logging; logging.getLogger('mri_alm').info('%s', NAME)", "stdout"),
    ],
)  # fmt: skip
def test_every_way_out_is_the_same_one(code: str, stream: str) -> None:
    shown = getattr(run(code), stream).decode()
    assert WRITTEN in shown
    assert not set(HOSTILE) & set(shown) - set("ab[2J1mgnp")


def test_a_log_file_holds_no_escapes_either(tmp_path: Path) -> None:
    code = f"import logging; logging.basicConfig(filename={str(tmp_path / 'log')!r}); logging.error('%s', NAME)"
    assert run(code).returncode == 0
    assert (tmp_path / "log").read_text("utf-8") == f"ERROR:root:{WRITTEN}\n"


def test_a_handler_made_before_writes_no_escapes() -> None:
    code = "import logging, sys; logging.getLogger().addHandler(logging.StreamHandler(sys.stdout._wrapped))\n"
    shown = run(code + "logging.warning(NAME)").stdout.decode()
    assert shown == f"{WRITTEN}\n"


def test_a_progress_bar_moves_and_a_log_line_goes_round_it() -> None:
    """As the programs do it: MONAI sets up logging before the first line of a config runs."""
    code = """
import logging, sys
from tqdm.contrib.logging import logging_redirect_tqdm
from mri_alm.runtime.progress import progress_bar
handler = logging.StreamHandler(sys.stderr._wrapped)
logging.getLogger().addHandler(handler)
with logging_redirect_tqdm(), progress_bar("step", 2, "study") as bar:
    assert handler not in logging.getLogger().handlers, "the bar would be written over"
    logging.warning(NAME)
    bar.update(2)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    shown = done.stderr.decode()
    assert "\rstep: 100%" in shown
    assert f"\r{WRITTEN}\n" in shown.replace(" ", "").replace("\r\r", "\r")
    assert "\\r" not in shown.replace(WRITTEN, "")


def test_the_user_s_streams_stay_theirs() -> None:
    code = "import sys; print(sys.stdout.fileno(), sys.stdout.encoding, sys.stdout == sys.stdout._wrapped)\n"
    code += "print(len({sys.stdout, sys.stdout._wrapped, sys.stderr}), sys.stdout == sys.stderr)"
    assert run(code).stdout == b"1 utf-8 True\n2 False\n"


def test_evaluating_a_folder_with_a_hostile_name_from_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    truth = write_rows(folder / "labels.csv", labels())
    good = write_rows(folder / "scores.csv", scores(labels(), 1)[1:])  # a study is missing: both files are named
    command = [sys.executable, "pipelines/evaluate.py", "--scores", good, "--labels", truth, "--output", folder / "out"]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, check=False, timeout=120)
    assert done.returncode == 2
    shown = done.stderr.decode()
    assert f"{WRITTEN}/scores.csv: no row there for 1 study (S000) of" in shown
    assert harmless(shown) == shown
    assert done.stdout == b""
