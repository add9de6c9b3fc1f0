"""What a training says: a line an epoch on the terminal, and all of it in the run folder's log."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from mri_alm.bundle.run_folder import RunFolder
from mri_alm.errors import InputError
from mri_alm.training.member import epoch_line, not_learnt, run_log, say_split, split_line, train_in_turn

EPOCH = {"epoch": 1, "val_auc": 0.5, "train_auc": 0.5, "base_loss": 0.62, "alm_term": 0.38}


@pytest.mark.parametrize(
    ("left", "words"),
    [(0.2, "0 s left"), (89, "89 s left"), (125, "2 min left"), (5399, "90 min left"), (5400, "2 h left")],
)
def test_the_line_of_an_epoch(left: float, words: str) -> None:
    history = [EPOCH | {"epoch": number, "val_auc": 0.9 + number / 100} for number in (1, 2, 3)]
    line = f"split 3/10  epoch 3/60  val AUC 0.930  constraint 38 % of loss  {words}"
    assert epoch_line(history, "split 3/10", 60, left) == line


def test_without_a_loss_there_is_no_share_of_it() -> None:
    report = {"epoch": 1.0, "val_accuracy": 0.5, "base_loss": 0.0, "alm_term": 0.0}
    assert epoch_line([report], "split 1/1", 2, 3) == "split 1/1  epoch 1/2  val accuracy 0.500  3 s left"


def test_the_line_of_a_split_names_its_highest_metric_and_the_first_epoch_of_it() -> None:
    history = [EPOCH | {"epoch": number, "val_auc": value} for number, value in ((1, 0.7), (2, 0.8), (3, 0.8))]
    assert split_line(history, "split 2/3") == "split 2/3  trained: 3 epochs, highest val AUC 0.800 in epoch 2"


def test_a_split_without_any_metric_names_none() -> None:
    history = [{"epoch": 1.0, "base_loss": 0.7, "alm_term": 0.0}]
    assert split_line(history, "split 1/1") == "split 1/1  trained: 1 epochs"


def test_a_training_that_learnt_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    history = [{"epoch": float(epoch), "val_auc": 0.5, "train_auc": 0.55} for epoch in range(1, 11)]
    said = not_learnt(history)
    assert "after 10 epochs the AUC on its own training exams is 0.55" in said
    assert "Lower --learning_rate" in said
    assert not_learnt(history[:9]) == "", "too early to say"
    assert not_learnt([*history[:9], {"epoch": 10.0, "val_auc": 0.5, "train_auc": 0.6}]) == ""
    assert not_learnt([*history[:9], {"epoch": 10.0, "val_accuracy": 0.5}]) == "", "of several classes"
    say_split(history, "split 2/3")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages[1] == f"split 2/3  {said}"


def test_splits_in_turn_say_each_epoch_once_and_not_those_of_an_earlier_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    earlier = {0: 2, 1: 1, 2: 0}  # epochs that were there

    def train(split: int, progress: Any) -> None:
        history = [EPOCH | {"epoch": number + 1} for number in range(earlier[split])]
        progress(history)
        while len(history) < 2:
            history.append(EPOCH | {"epoch": len(history) + 1})
            progress(history)

    train_in_turn({"splits": 3, "only_split": None, "max_epochs": 2}, train)
    lines = [re.match(r"split \d/\d  (epoch \d/\d|trained: \d epochs)", message) for message in caplog.messages]
    assert [line[0] for line in lines if line] == [
        "split 1/3  trained: 2 epochs", "split 2/3  epoch 2/2", "split 2/3  trained: 2 epochs",
        "split 3/3  epoch 1/2", "split 3/3  epoch 2/2", "split 3/3  trained: 2 epochs",
    ]  # fmt: skip
    assert caplog.messages[-2].endswith(" 0 s left")


def test_the_figures_of_an_epoch_are_in_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with run_log(RunFolder(tmp_path)):
        logging.getLogger("mri_alm.figures").info("split_0  epoch 1  val_auc 0.5")
        logging.getLogger("mri_alm").info("split 1/2  epoch 1/3")
    logging.getLogger("mri_alm").info("later")
    assert caplog.messages == ["split 1/2  epoch 1/3", "later"]
    lines = (tmp_path / "run.log").read_text("utf-8").splitlines()
    assert [line.partition(" INFO ")[2] for line in lines] == ["split_0  epoch 1  val_auc 0.5", "split 1/2  epoch 1/3"]


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "run.log").symlink_to(tmp_path / "mine")
    with (
        pytest.raises(InputError, match=r"run\.log is a link, which may lead to another file of yours"),
        run_log(RunFolder(tmp_path)),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_run_s_log_has_every_epoch_of_every_split(trained: Path) -> None:
    text = (trained / "run.log").read_text("utf-8")
    found = [(f"split_{split}", str(epoch)) for split in range(3) for epoch in (1, 2)]
    assert re.findall(r"INFO (split_\d)  epoch (\d)  val_auc \d", text) == found
    assert re.findall(r"INFO split (\d)/3  epoch (\d)/2  val AUC \d", text) == [
        (str(int(s[-1]) + 1), e) for s, e in found
    ]
    assert f"Ensemble of 3 models in {trained}" in text
