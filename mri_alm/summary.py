"""What a finished run says of itself: the figures of its test cohort, and the closing text."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mri_alm.metrics import FprRule, auc, fpr_at_fn, fpr_at_tpr

FALSE_NEGATIVES = (0, 1, 2, 5)  # columns of the paper's Table 3
TRUE_POSITIVE_RATES = (98, 95, 92, 90)  # percent, those of its other tables


def test_metrics(
    labels: NDArray[np.int64], logits: NDArray[np.float64], needed: NDArray[np.int64], *, fpr_rule: FprRule
) -> dict[str, Any]:
    """Figures of the test cohort; FPR at k FN takes its threshold from the test labels, as in the paper."""
    mean = logits.mean(1)
    members = [auc(labels, column) for column in logits.T]
    positive = labels == 1
    return {
        "positives": int(positive.sum()),
        "negatives": int((~positive).sum()),
        "ensemble_auc": auc(labels, mean),
        "member_auc": spread(members),
        "fpr_at_fn": {str(k): fpr_at_fn(labels, mean, k) for k in FALSE_NEGATIVES if k < positive.sum()},
        "fpr_at_tpr": {str(tpr): fpr_at_tpr(labels, mean, tpr / 100, rule=fpr_rule) for tpr in TRUE_POSITIVE_RATES},
        "at_threshold": {
            "false_negatives": int((positive & (needed == 0)).sum()),
            "false_positives": int((~positive & (needed == 1)).sum()),
            "spared": int((needed == 0).sum()),
        },
    }


def closing_text(folder: Path, metrics: dict[str, Any], point: Any, members: int) -> str:
    """The closing text: the paper's Table 3 row, the operating point and what it rests on, where the files are."""
    lines = [f"Ensemble of {members} models in {folder}", ""]
    if test := metrics.get("test"):
        columns = [(f"FPR @{k} FN", f"{100 * value:.1f} %") for k, value in test["fpr_at_fn"].items()]
        mean, sd = test["member_auc"]["mean"], test["member_auc"]["sd"]
        columns += [
            ("avg AUC", f"{100 * mean:.1f} ± {100 * sd:.1f}"),
            ("ensemble AUC", f"{100 * test['ensemble_auc']:.1f}"),
        ]
        lines += [f"Test cohort: {test['positives']} exams need DCE, {test['negatives']} do not"]
        lines += [
            "  ".join(name.rjust(12) for name, _ in columns),
            "  ".join(value.rjust(12) for _, value in columns),
            "",
        ]
    lines.append(point.in_words())
    if test:
        at = test["at_threshold"]
        lines += [
            f"  On the test cohort it misses {at['false_negatives']} of {test['positives']}, spares {at['spared']} of "
            f"{test['positives'] + test['negatives']} the contrast, asks for it needlessly in {at['false_positives']}."
        ]
    lines += ["", f"Score new exams: python pipelines/score.py --model {folder} --input DICOM_FOLDER --output OUT"]
    files = "threshold.json, metrics.json, heldout.csv, splits.csv, config.json" + (", scores.csv" if test else "")
    lines.append(f"Written: {files}; per split model.pt, split.json and TensorBoard events.")
    return "\n".join([*lines, *([f"Open in a browser: {folder / 'report.html'}"] if test else [])])


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation over the members, and each value."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "sd": sd, "members": values}
