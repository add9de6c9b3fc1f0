"""The command as a shell starts it: what it answers, with which status, to what is typed and to what is mistyped."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from shell import ROOT, WarmPython
from small_cohort import SETTINGS

from mri_alm.bundle.settings import TABLE
from mri_alm.errors import InputError
from mri_alm.programs import train_ensemble
from mri_alm.programs.command import PROGRAMS
from mri_alm.programs.train_ensemble import words_in

MISTAKES: list[tuple[str, str]] = [  # what is typed in an empty folder with some bad files, and what the answer says
    ("", "usage: mri-alm [-h] [--version] COMMAND"),
    ("trian", 'There is no command "trian". Did you mean "train"?'),
    ("score.py --model x", 'There is no command "score.py". Did you mean "score"?'),
    ("--modle x", "mri-alm: error: the following arguments are required: COMMAND"),
    ("train --max_epoch 3", 'There is no setting "max_epoch". Did you mean "max_epochs"?'),
    ("train --max_epochs many", "max_epochs must be a whole number from 1 to 100000, got many"),
    ("train --max_epochs 0", "max_epochs must be a whole number from 1 to 100000, got 0"),
    ("train --max_epochs", "Settings are pairs such as --max_epochs 20"),
    ("train max_epochs 3", "Settings are pairs such as --max_epochs 20"),
    ("train --patience None", "Write --patience '$None' instead"),
    ("train --register false", 'register is the text "false". Write False.'),
    ("train --workers four", "argument --workers: invalid int value: 'four'"),
    ("train --config missing.yaml", "--config missing.yaml: cannot be read (No such file or directory)"),
    ("train --config bad.yaml", "--config bad.yaml: at line 3 it is not YAML"),
    ("train --config list.yaml", "--config list.yaml: it must hold a line a setting"),
    ("train --config twice.yaml", "--config twice.yaml: line 2: max_epochs is there twice. Keep one."),
    ("train --config strange.yaml", 'There is no setting "epochs". Did you mean "max_epochs"?'),
    ("train --cohort missing.csv --run_dir r", "missing.csv"),
    ("score --model r --output o", "the following arguments are required: --input"),
    ("score --model missing --input . --output o", "missing"),
    ("score --model missing --input . --output bad.yaml", "bad.yaml"),
    ("evaluate --scores missing.csv --labels labels.csv --output o", "missing.csv"),
    ("evaluate --scores labels.csv --labels labels.csv --output o", "labels.csv"),
    ("evaluate --scores labels.csv --labels labels.csv --output o --draws 5", "--draws must be 100 or more"),
    ("report missing", "--run takes the folder of a finished training"),
    ("prepare --input . --output", "argument --output: expected one argument"),
    ("prepare --input missing --output c", "missing"),
    ("prepare --output c", "give --input and --output, or --check"),
    ("check missing", "missing"),
    ("settings lerning", 'No setting has "lerning". Did you mean "learning_rate"?'),
    ("settings --of prostate", "invalid choice: 'prostate'"),
    ("inspect missing", "missing"),
    ("export --model missing --output b", "missing"),
    ("phantom p --train 1", "train"),
    ("benchmark --table cifar11", "cifar11"),
    ("completion fish", "invalid choice: 'fish' (choose from"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that are no good."""
    folder = tmp_path_factory.mktemp("typed")
    files = {
        "bad.yaml": "max_epochs: 3\nloss: [bce\n",
        "list.yaml": "- max_epochs\n",
        "labels.csv": "study,label\na,1\n",
    }
    files |= {"twice.yaml": "max_epochs: 3\nmax-epochs: 4\n", "strange.yaml": "epochs: 3\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def typed(python: WarmPython, place: Path, words: str) -> "subprocess.CompletedProcess[str]":
    """``mri-alm WORDS`` in a folder outside the checkout."""
    line = f'cd "$0" && export PYTHONPATH="{ROOT}" && "{python.program}" -m mri_alm {words}'
    return subprocess.run(["sh", "-c", line, str(place)], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("words", "answer"), MISTAKES, ids=[words or "nothing" for words, _ in MISTAKES])
def test_a_mistake_is_answered_in_words(python: WarmPython, place: Path, words: str, answer: str) -> None:
    done = typed(python, place, words.replace("'", "\\'"))
    assert done.returncode == 2, done.stderr
    assert answer in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_s_help_has_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [f"mri-alm {name}"])
    text = PROGRAMS[name].part("parser")().format_help()
    assert text.startswith(f"usage: mri-alm {name} [-h]")
    assert re.search(rf"^  mri-alm {name}( |$)", text, re.MULTILINE)


def test_the_settings_that_are_listed_are_those_of_the_table(python: WarmPython, place: Path) -> None:
    done = typed(python, place, "settings")
    assert re.findall(r"^  --(\w+)  \(default: ", done.stdout, re.MULTILINE) == list(TABLE["prostate_alm"])
    few = typed(python, place, "settings max_fn").stdout
    assert few == "Training:\n  --max_fn  (default: 1)\n      Held-out positives that the threshold may miss.\n"


def test_a_closed_pipe_ends_it_quietly(python: WarmPython, place: Path) -> None:
    done = typed(python, place, "settings | head -1")
    assert (done.stdout, done.stderr) == ("Cohort:\n", "")


def test_a_shell_completes_commands_options_and_settings(python: WarmPython, place: Path) -> None:
    script = typed(python, place, "completion bash").stdout

    def complete(*words: str) -> list[str]:
        line = f'{script}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mri_alm; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", line, "-", *words], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert complete("mri-alm", "s") == ["score", "settings", "sweep"]
    assert complete("mri-alm", "score", "--mo") == ["--model"]
    assert complete("mri-alm", "train", "--max_e") == ["--max_epochs"]
    assert complete("mri-alm", "train", "--cohort", "da") == []  # a file's name: the shell's own


def test_a_file_of_settings_means_what_is_typed(tmp_path: Path) -> None:
    """The default of every setting, written as YAML and as a word; and letters that YAML reads as something else."""
    file = tmp_path / "mine.yaml"
    plain = {name: one.default for name, one in TABLE["prostate_alm"].items() if not str(one.default).startswith("$")}
    file.write_text(yaml.safe_dump(plain))
    read = train_ensemble.parse(["--config", str(file)])
    none = {name for name, value in plain.items() if value is None}
    assert {name for name, value in read.items() if value == "$None"} == none
    shown = {name: list(value) if isinstance(value, tuple) else value for name, value in read.items()}
    assert {name: value for name, value in shown.items() if name not in none} == {
        name: value for name, value in plain.items() if name not in none
    }
    file.write_text("exclude: [0012, 1e3, yes]\nrun-dir: 0012\nmu0: 1e-3\nregister: true\nmax_epochs: 3\n")
    assert train_ensemble.parse(["--config", str(file), "--max_epochs", "4"]) == {
        "exclude": ("0012", "1e3", "yes"), "run_dir": "0012", "mu0": 1e-3, "register": True, "max_epochs": 4,
    }  # fmt: skip


HOSTILE = (b"\xff\xfe\x00", b"a: &a [*a]\n", b"!!python/object:os.system x\n", b"a: 1" * 400_000, b"? [a]\n: 1\n")


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_of_settings_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"mine\.yaml"):
        words_in(file)


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_shows_its_help(python: WarmPython, path: Any) -> None:
    done = python.run(path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {path.name} [-h]")


def test_it_goes_on_from_any_folder_with_what_the_bundle_trained(
    python: WarmPython, trained: Path, manifest: Path, tmp_path: Path
) -> None:
    """The parts of the shipped config lie elsewhere, and the run is still one with the same config."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "threshold.json").unlink()
    words = [f"--{name} '{value}'" for name, value in (SETTINGS | {"cohort": manifest, "run_dir": "run"}).items()]
    done = typed(python, tmp_path, " ".join(["train", *words, "--cache_dir", str(manifest.parent / "cache")]))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert f"Ensemble of {SETTINGS['splits']} models in run\n" in done.stdout
    assert (run / "threshold.json").read_bytes() == (trained / "threshold.json").read_bytes()
