import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from monai.data import Dataset
from monai.transforms import Compose, RandFlipd
from small_training import SAMPLES, Net, training
from torch import Tensor, nn

from mri_alm.alm.batches import ProcessShare
from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.errors import InputError
from mri_alm.networks import AutocastInferer
from mri_alm.training.engine import CheckpointRule, EpochSeed

# --- Trainer --------------------------------------------------------------------------------------------------------


def test_trainer_is_the_plain_loop_with_multipliers(tmp_path: Path) -> None:
    """Against a loop written out: the order of forward, backward, step, dual step, and each sample's own multiplier."""
    trainer, _ = training(tmp_path, 0.7)
    batches: list[dict[str, Tensor]] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda engine: batches.append(engine.state.batch))
    trainer.run()
    torch.manual_seed(1)
    network = Net()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    multiplier = torch.zeros(SAMPLES, dtype=torch.float64)
    for batch in batches:
        logits, label = network(batch["image"]).flatten(), batch["label"]
        score = torch.sigmoid(logits)
        q = torch.relu(0.25 - score[label == 1][:, None] + score[label == 0][None]).sum(1).double()
        pairs, own = max(len(q) * (len(label) - len(q)), 1), batch["index"][label == 1]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label.float())
        loss = loss + (0.25 * (q**2).sum() / pairs + (multiplier[own] * q).sum() / pairs)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        multiplier[own] += 0.5 * q.detach()
    torch.testing.assert_close(trainer.network.state_dict(), network.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trainer.loss_function.multipliers, multiplier, rtol=1e-6, atol=1e-8)
    assert multiplier.count_nonzero() == 4


def test_trainer_leaves_the_loss_as_it_was_also_after_an_error(tmp_path: Path) -> None:
    trainer, end = training(tmp_path, 0.7)
    trainer.network.linear = nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer.run()
    assert trainer.loss_function is end.parts["objective"]


# --- Inferer --------------------------------------------------------------------------------------------------------


def test_inferer_computes_in_bfloat16_and_gives_float32() -> None:
    network, image = Net(), torch.randn(4, 1, 3)
    plain = AutocastInferer()(image, network)
    fast = AutocastInferer(enabled=True)(image, network)
    assert (plain.dtype, fast.dtype) == (torch.float32, torch.float32)
    assert torch.equal(plain, network(image))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast, network(image).float())
    assert not torch.equal(plain, fast)


def test_a_micro_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="micro_batch must be 1 or more exams, or None for the whole batch, got -1"):
        AutocastInferer(micro_batch=-1)


def test_inferer_computes_in_parts_while_training() -> None:
    seen: list[int] = []
    network, image = Net(), torch.randn(7, 1, 3)
    network.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    inferer = AutocastInferer(micro_batch=3)
    torch.testing.assert_close(inferer(image, network), network.linear(image.flatten(1)))
    assert seen == [3, 3, 1]
    with torch.no_grad():
        inferer(image, network)
    assert seen == [3, 3, 1, 7]


# --- Seeds ----------------------------------------------------------------------------------------------------------


def test_an_epoch_s_order_and_augmentation_depend_on_seed_and_epoch_only() -> None:
    def epoch(seed: int, number: int, noise: int) -> list[Any]:
        torch.manual_seed(noise)
        dataset = Dataset([{"image": torch.arange(3.0)[None]}] * 40, Compose([RandFlipd("image", 0.5, 0)]))
        engine = Engine(lambda *_: None)
        EpochSeed(seed, dataset, ProcessShare([])).attach(engine)
        engine.state.epoch = number
        engine.fire_event(Events.EPOCH_STARTED)
        return [torch.rand(1).item(), *[dataset[i]["image"].flatten().tolist() for i in range(40)]]

    first = epoch(3, 5, noise=0)
    assert epoch(3, 5, noise=1) == first
    assert epoch(3, 6, noise=0) != first
    assert epoch(4, 5, noise=0) != first


# --- End of an epoch ------------------------------------------------------------------------------------------------


def test_the_best_model_is_kept_the_earlier_one_on_a_tie(tmp_path: Path) -> None:
    trainer, end = training(tmp_path, 0.6, 0.8, 0.8, 0.7)
    weights: list[dict[str, Tensor]] = []
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: weights.append({k: v.clone() for k, v in trainer.network.state_dict().items()})
    )
    trainer.run()
    assert (end.selection.best["auc"], end.selection.best["epoch"]) == (0.8, 2)
    model = load_tensors(tmp_path / "model.pt")
    assert model.keys() == {"model", "guard", "preset"}
    torch.testing.assert_close(dict(model["model"]), weights[1], rtol=0, atol=0)
    last = load_tensors(tmp_path / "last.pt")
    torch.testing.assert_close(dict(last["model"]), weights[3], rtol=0, atol=0)
    assert [report["val_auc"] for report in end.history] == [0.6, 0.8, 0.8, 0.7]
    assert last["history"] == end.history
    assert [report["mu"] for report in end.history] == [0.5, 0.5, 0.5, 0.5]
    assert end.history[-1]["mu_next"] == 1.0


def test_tensorboard_has_every_figure_of_every_epoch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    trainer, end = training(tmp_path, 0.6, 0.8)
    trainer.run()
    (file,) = tmp_path.glob("events.*")
    events = EventAccumulator(str(file)).Reload()
    assert set(events.Tags()["scalars"]) == set(end.history[0])
    for name in end.history[0]:
        assert [event.value for event in events.Scalars(name)] == pytest.approx([epoch[name] for epoch in end.history])


def test_every_epoch_tells_what_the_constraint_does_on_the_validation_set(tmp_path: Path) -> None:
    """Three exams of logits 0.2 (positive), 0.9, -1: by hand, as probabilities with delta 0.25."""
    trainer, end = training(tmp_path, 0.6, 0.8)
    trainer.run()
    high, low, own = (1 / (1 + math.exp(-z)) for z in (0.9, -1.0, 0.2))
    q = 0.25 - own + high + max(0.0, 0.25 - own + low)
    for report in end.history:
        assert report["val_violation"] == pytest.approx(q / 2, rel=1e-6)
        assert report["val_satisfied"] == 0
        assert report["val_loss"] == pytest.approx(-(math.log(own) + math.log(1 - high) + math.log(1 - low)) / 3)
    assert end.parts["objective"].multipliers.count_nonzero() == 4  # those of the training's positives alone


def test_training_stops_when_there_is_no_better_epoch_and_stays_stopped(tmp_path: Path) -> None:
    trainer, end = training(tmp_path, 0.6, 0.8, 0.7, 0.75, 0.9, patience=2)
    trainer.run()
    assert [report["val_auc"] for report in end.history] == [0.6, 0.8, 0.7, 0.75]
    again, end = training(tmp_path, *[0.9] * 5, patience=2)
    assert end.finished(again)
    more, end = training(tmp_path, *[0.9] * 5, patience=3)
    assert not end.finished(more)


def test_the_official_rule_breaks_ties_by_the_validation_loss() -> None:
    def kept(rule: Any, *epochs: tuple[float, float, float]) -> list[bool]:
        selection = CheckpointRule(rule=rule)
        names = ("val_auc", "val_loss", "train_auc")
        return [
            selection.improves({"epoch": n} | dict(zip(names, values, strict=True)))
            for n, values in enumerate(epochs, 1)
        ]

    tie = [(0.8, 0.5, 0.9), (0.8, 0.4, 0.9), (0.8, 0.4, 0.9), (0.8, 0.3, 0.74), (0.9, 0.9, 0.5)]
    assert kept("best", *tie) == [True, False, False, False, True]
    assert kept("official", *tie) == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "latest"}, 'checkpoint_rule must be one of best, official, last, got "latest"'),
        ({"patience": 0}, "patience must be 1 or more epochs, or None to train them all, got 0"),
        ({"patience": 2, "rule": "last"}, "patience 2 waits for a better epoch, and checkpoint_rule last knows none"),
        ({"ema": 1.0}, r"ema must be 0 \(no average\) or a decay below 1, such as 0\.99, got 1\.0"),
    ],
)
def test_selection_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CheckpointRule(**options)


@pytest.mark.filterwarnings(
    "ignore:.*torch.cuda.amp.GradScaler:FutureWarning", "ignore:.*CUDA is not available:UserWarning"
)
def test_no_dual_step_when_the_gradient_scaler_skipped_the_optimiser(tmp_path: Path) -> None:
    trainer, _ = training(tmp_path, 0.6)
    scaler = torch.amp.GradScaler("cpu")
    trainer.network.linear.weight.register_hook(lambda gradient: gradient / 0)
    trainer.amp = True
    trainer.add_event_handler(Events.STARTED, lambda: setattr(trainer, "scaler", scaler))  # MONAI's is for CUDA only
    before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    trainer.run()
    assert scaler.get_scale() < 2.0**16
    assert all(torch.equal(value, before[name]) for name, value in trainer.network.state_dict().items())
    assert trainer.loss_function.multipliers.count_nonzero() == 0


def test_the_last_rule_keeps_the_last_epoch_whatever_validation_says(tmp_path: Path) -> None:
    trainer, end = training(tmp_path, 0.9, 0.6, 0.7, rule="last")
    trainer.run()
    assert end.selection.best == {"auc": 0.7, "epoch": 3, "loss": end.history[2]["val_loss"]}
    kept, last = (load_tensors(tmp_path / name)["model"] for name in ("model.pt", "last.pt"))
    torch.testing.assert_close(dict(kept), dict(last), rtol=0, atol=0)
    assert end.finished(trainer)


def test_averaged_weights_are_validated_and_kept_and_training_goes_on_with_its_own(tmp_path: Path) -> None:
    """Against the recursion written out, in double precision, of the weights that plain training has after a step."""
    steps: list[Tensor] = []
    plain, _ = training(tmp_path / "plain", 0.6, 0.8)
    plain.add_event_handler(Events.ITERATION_COMPLETED, lambda: steps.append(plain.network.linear.weight.data.clone()))
    plain.run()
    trainer, end = training(tmp_path / "ema", 0.6, 0.8, ema=0.9)
    validated = []
    end.validator.add_event_handler(
        Events.STARTED, lambda: validated.append(end.validator.network.linear.weight.data.clone())
    )
    trainer.run()
    average, expected = steps[0].double(), []
    for step, weight in enumerate(steps[1:], 2):
        average = 0.9 * average + 0.1 * weight.double()
        if step % (len(steps) // 2) == 0:
            expected.append(average)
    assert len(steps) == 6
    torch.testing.assert_close(torch.stack(validated).double(), torch.stack(expected), rtol=1e-6, atol=1e-7)
    kept, last = (load_tensors(tmp_path / "ema" / name)["model"] for name in ("model.pt", "last.pt"))
    assert torch.equal(kept["linear.weight"], validated[1])
    assert torch.equal(last["linear.weight"], steps[-1])
    assert kept.keys() == last.keys()


AUCS = (0.6, 0.8, 0.7, 0.75, 0.5)


@pytest.mark.parametrize(("stop", "selection"), [(1, {}), (2, {}), (4, {}), (2, {"ema": 0.9, "rule": "last"})])
def test_a_run_broken_off_after_any_epoch_ends_bit_for_bit_the_same(
    tmp_path: Path, stop: int, selection: dict[str, Any]
) -> None:
    whole, _ = training(tmp_path / "whole", *AUCS, **selection)
    whole.run()
    broken, _ = training(tmp_path / "broken", *AUCS, **selection)
    broken.add_event_handler(Events.EPOCH_COMPLETED(once=stop), broken.terminate)
    broken.run()
    torch.rand(17)  # another process has another state of chance
    resumed, end = training(tmp_path / "broken", *AUCS, **selection)
    assert resumed.state.epoch == stop
    end.validator.aucs = iter(AUCS[stop:])
    resumed.run()
    states = [load_tensors(tmp_path / name / "last.pt") for name in ("whole", "broken")]
    assert states[0].keys() == states[1].keys()
    for part in ("model", "objective", *(["average"] if selection else [])):
        assert states[0][part].keys() == states[1][part].keys()
        assert all(torch.equal(states[0][part][k].nan_to_num(-1), states[1][part][k].nan_to_num(-1))
                   for k in states[0][part])  # fmt: skip
    assert states[0]["objective"]["multipliers"].max() > 0
    for key in ("best", "history", "guard", "preset"):
        assert states[0][key] == states[1][key]
    for whole_state, broken_state in zip(
        states[0]["optimizer"]["state"].values(), states[1]["optimizer"]["state"].values(), strict=True
    ):
        assert all(torch.equal(whole_state[k], broken_state[k]) for k in whole_state)
    models = [load_tensors(tmp_path / name / "model.pt")["model"] for name in ("whole", "broken")]
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])


def test_a_worse_epoch_after_a_resume_does_not_replace_the_best_model(tmp_path: Path) -> None:
    first, _ = training(tmp_path, 0.9)
    first.run()
    best = load_tensors(tmp_path / "model.pt")["model"]
    resumed, end = training(tmp_path, 0.9, 0.8)
    end.validator.aucs = iter([0.8])
    resumed.state.max_epochs = 2
    resumed.run()
    assert len(end.history) == 2
    assert end.selection.best["epoch"] == 1
    found = load_tensors(tmp_path / "model.pt")["model"]
    assert all(torch.equal(best[k], found[k]) for k in best)


def test_a_crash_between_the_two_files_is_repaired_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.pt of epoch 2 is written, last.pt is still of epoch 1: the epoch is repeated with the same result."""
    trainer, _ = training(tmp_path, 0.6, 0.8)

    def crash(path: Path, state: Any, **options: Any) -> None:
        if path.name == "last.pt" and state["history"][-1]["epoch"] == 2:
            raise KeyboardInterrupt
        save_tensors(path, state, **options)

    monkeypatch.setattr("mri_alm.training.engine.save_tensors", crash)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        trainer.run()
    written = load_tensors(tmp_path / "model.pt")["model"]
    monkeypatch.undo()
    resumed, end = training(tmp_path, 0.6, 0.8)
    assert resumed.state.epoch == 1
    end.validator.aucs = iter([0.8])
    resumed.run()
    found = load_tensors(tmp_path / "model.pt")["model"]
    assert all(torch.equal(written[k], found[k]) for k in written)
    assert (end.selection.best["auc"], end.selection.best["epoch"]) == (0.8, 2)


def test_a_checkpoint_of_another_cohort_or_split_is_refused(tmp_path: Path) -> None:
    training(tmp_path, 0.6)[0].run()
    message = f"{tmp_path / 'last.pt'} belongs to another cohort or split. Restore it, or choose another run_dir."
    with pytest.raises(InputError, match=re.escape(message)):
        training(tmp_path, 0.6, split_digest="other")


@pytest.mark.parametrize("wrong", ["other network", "other cohort size", "model.pt"])
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, wrong: str) -> None:
    training(tmp_path, 0.6)[0].run()
    state = load_tensors(tmp_path / "last.pt")
    if wrong == "other network":
        state["model"] = nn.Linear(5, 1).state_dict()
    elif wrong == "other cohort size":
        state["objective"]["multipliers"] = torch.zeros(SAMPLES + 1, dtype=torch.float64)
    else:
        state = load_tensors(tmp_path / "model.pt")
    save_tensors(tmp_path / "last.pt", state)
    with pytest.raises(InputError, match=r"last\.pt is no checkpoint of this network\. Restore it, or choose"):
        training(tmp_path, 0.6)


def test_a_training_that_diverges_says_so_and_keeps_what_was_finished(tmp_path: Path) -> None:
    """No study is at fault, so none is asked to be left out."""
    trainer, end = training(tmp_path, 0.6, 0.8)

    @trainer.on(Events.EPOCH_STARTED(once=2))  # type: ignore[untyped-decorator]
    def diverge() -> None:
        end.parts["model"].linear.weight.data.fill_(math.nan)

    said = rf"^Training diverged in epoch 2 of {re.escape(str(tmp_path))}: scores nan\. No study is at fault\. "
    with pytest.raises(InputError, match=said + r"Lower --learning_rate \(now 0\.05\), --mu0 or --mu_cap"):
        trainer.run()
    assert [epoch["epoch"] for epoch in load_tensors(tmp_path / "last.pt")["history"]] == [1]
    assert training(tmp_path, 0.6, 0.8)[0].state.epoch == 1
