"""The model card, and which items of CLAIM and TRIPOD+AI it fills; what software cannot know is left to the authors."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mri_alm.bundle.run_folder import RunRecord
from mri_alm.cohort.protocol import trained_in_words, training_note
from mri_alm.evaluation.analysis import Evaluation
from mri_alm.evaluation.data import LabelledScores
from mri_alm.runtime.files import read_json

LEFT_TO_AUTHORS = "to be filled by the authors"
_UNKNOWN = "No training run was given (--run): unknown to this report."
_ITEMS = Path(__file__).with_name("reporting_items.json")
_PACKAGES = ("mri-alm", "numpy", "scipy", "scikit-learn", "plotly")  # what the figures were computed and drawn with


def model_card(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    """Section to rows of name and text."""
    data, run = evaluation.data, evaluation.run
    hashes = {"labels": data.sha256} | {f"scores of {model.name}": model.sha256 for model in data.models}
    card = {
        "Purpose": {
            "Intended use": "Research on which prostate MRI exams need a contrast injection (DCE).",
            "Not for": "Decisions about patients. It is no medical device and was not validated as one.",
            "Input": "T2, ADC and a high b-value image of one exam, diffusion registered to T2." if run else _UNKNOWN,
            "Output": "A score that grows with the need for DCE; with a threshold, needed or not.",
        },
        "Training": _training(run) if run else {"Training": _UNKNOWN},
        "Evaluation": {"Cohort": _cohort(data), "Statistics": _statistics(evaluation)},
        "Limits": {
            "Threshold": _threshold(run),
            "Positives": f"{data.positives} evaluated positives.",
            "Score": "Not a probability of need unless the calibration figure says so.",
            "Generalisation": "Other scanners, protocols and populations than those evaluated are unknown territory.",
        },
        "Versions": {f"{name} (report)": version(name) for name in _PACKAGES}
        | ({f"{name} (training)": text for name, text in run.versions.items()} if run else {}),
        "SHA-256": hashes | (run.digests if run else {}),
    }
    if run:
        card["Settings of the training"] = {name: json.dumps(value) for name, value in run.settings.items()}
    return card


def checklist(evaluation: Evaluation) -> list[dict[str, str]]:
    """Items of CLAIM (2024) and TRIPOD+AI (2024): guide, item, topic, text; :data:`LEFT_TO_AUTHORS` where unknown.

    Topics are our own words: read the guides themselves before submitting.
    """
    known = _known(evaluation)
    return [
        {"guide": guide, "item": item, "topic": topic, "text": known.get(key) or LEFT_TO_AUTHORS}
        for guide, rows in read_json(_ITEMS).items()
        for item, topic, key in rows
    ]


def _cohort(data: LabelledScores) -> str:
    """The evaluated cohort in a sentence."""
    return f"{data.in_words()}; {len(data.left_out)} further rows of the label table left out with a reason."


def _statistics(evaluation: Evaluation) -> str:
    """How the intervals and tests were computed."""
    return (
        "95 % intervals: AUC by Newcombe's method 5; FPRs and the like by stratified percentile bootstrap "
        f"({evaluation.draws} draws, seed {evaluation.seed}), of patients where they have several exams; "
        "proportions: Clopper and Pearson; AUCs compared by DeLong's paired test, Holm over all pairs. Upper "
        "bounds of the miss rate: Clopper and Pearson, one-sided, 95 %, independent exams assumed."
    )


def _training(run: RunRecord) -> dict[str, str]:
    settings = run.settings
    labels = list(run.trained.values())
    members = {name: _mean_sd(aucs) for name, aucs in run.members.items()}
    note = training_note(run.trained_on)
    note += note and ": the built-in phantom, which says nothing about patients"
    return {
        "Cohort": f"{len(labels)} exams, {sum(labels)} need DCE" + (f"; {note}." if note else "."),
        "Scanners and protocols": trained_in_words(run.trained_on),
        "Partition": _partition(run),
        "Objective": f"loss {settings.get('loss')}, "
        + (
            "augmented Lagrangian with " + ", ".join(f"{name} {settings.get(name)}" for name in ("mu0", "delta", "rho"))
            if settings.get("mu0")
            else "no constraint"
        )
        + ".",
        "Selection": _selection(settings),
        **{f"AUC of the members, {side}": members[side] for side in ("validation", "test") if side in members},
        "Operating point": run.point.in_words().replace("\n", " "),
    }


def _partition(run: RunRecord) -> str:
    if not run.point.n_positive:
        return "All training patients were trained on; nobody was held out. One model."
    if run.settings.get("split_rule") == "partition":
        how = "folds of the training patients, every positive one held out once"
    else:
        share = 100 * float(run.settings.get("validation", 0))
        how = f"random stratified splits of the training patients, {share:g} % held out in each"
    counts = "largest" if run.point.folds else "mean"
    return f"{len(run.history)} {how}; one model each, the {counts} logit counts."


def _selection(settings: dict[str, Any]) -> str:
    rule, epochs, ema = (settings.get(name) for name in ("checkpoint_rule", "max_epochs", "ema"))
    which = f"last of {epochs} epochs" if rule == "last" else f"epoch of best validation AUC of at most {epochs}"
    average = f", weights averaged over steps (exponential, decay {ema})" if ema else ""
    return f"{which}, rule {rule or 'best'}{average}."


def _mean_sd(values: list[float]) -> str:
    sd = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{sd} % ({len(values)} members)"


def _threshold(run: RunRecord | None) -> str:
    if run is None:
        return "No operating point was given. A threshold read off this report was chosen on these labels."
    return f"{run.point.basis[0].upper()}{run.point.basis[1:]}."


def _known(evaluation: Evaluation) -> Mapping[str, Any]:
    """What the software can say, by key of ``reporting_items.json``."""
    run, data = evaluation.run, evaluation.data
    known = {
        "use": "See Purpose above (research only); the clinical background is the authors' to write.",
        "metrics": "AUC, FPR at fixed TPR and at k false negatives, sensitivity, specificity, calibration, benefit.",
        "statistics": _statistics(evaluation),
        "results": "Section Performance above.",
        "subgroups": "Section Subgroups above." if evaluation.groups else "",
        "cohort": _cohort(data) + " See How the cohort was built.",
        "missing": f"Exams without a usable image, label or score are left out and listed: {len(data.lost)} here.",
        "failures": "Every missed and needlessly examined exam is in the patient table.",
        "software": "Evaluated with mri-alm, Apache-2.0; versions above.",
        "limits": "See Limits above; further limitations are the authors' to write.",
    }
    if run:
        card = _training(run)
        known |= {
            "method": f"Deep learning: 3D convolutional networks on T2 and diffusion; {card['Objective']}",
            "partition": card["Partition"] + " The test cohort is in no split; patients are never on two sides.",
            "training": card["Objective"] + " All settings above.",
            "selection": card["Selection"],
            "ensemble": f"{len(run.history)} members, "
            + ("the largest logit counts." if run.point.folds else "logits averaged."),
            "imbalance": ("One constraint per positive exam; " if run.settings.get("mu0") else "") + card["Objective"],
            "versions": ", ".join(f"{name} {text}" for name, text in run.versions.items()),
            "preprocessing": f"Diffusion registered to T2: {run.settings.get('register')}; grid of "
            f"{run.settings.get('size')} points, spacing {run.settings.get('spacing')} mm about T2's centre.",
            "start": (
                "Weights of another run where they fit, else random" if "init_weights" in run.settings else "Random"
            )
            + f", seed {run.settings.get('seed')}.",
            "size": f"{len(run.trained)} training and {len(data.studies)} evaluated exams; no calculation was made.",
            "threshold": run.point.in_words().replace("\n", " "),
        }
    return known
