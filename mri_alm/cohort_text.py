"""What `pipelines/prepare_cohort.py` prints: the table of a dry run, and the closing lines. No names, ever."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mri_alm.errors import StudyError
from mri_alm.files import secret_of
from mri_alm.labels import Labelled
from mri_alm.prepared_cohort import Order, Outcome, make_plan, read_inputs
from mri_alm.selection import axial_t2, diffusion_sets
from mri_alm.series import Series


def dry_run(order: Order) -> str:
    """A table of the roles of all series and of what is known to be wrong, without reading an image or writing."""
    salt = secret_of(order.output) if (order.output / "salt").exists() else ""
    plan = make_plan(order, read_inputs(order), salt)
    lines = [f"{len(plan.jobs)} studies, layout {plan.found.layout}"]
    jobs = {job.source.uid: job for job in plan.jobs}
    for number, job in enumerate((jobs[source.uid] for source in plan.found.sources), 1):  # in the order of folders
        entry = plan.entry(job)
        label = "-" if entry is None or entry.label is None else str(entry.label)
        lines += ["", f"study {job.key if salt else f'#{number}'}   label {label}   {len(job.source.files)} files"]
        series = plan.preparation.roles(job)
        lines += [_line(one) for one in series] + ([_decision(series)] if series else [])
        names = sorted({(role, file.suffix) for file, role in job.source.used.items()})
        lines += [f"  {role:<12} a {ending} file" for role, ending in names]
        lines += [f"  failed: {job.source.error}"] if job.source.error else []
    return "\n".join([*lines, "", *label_lines(plan.labelled, plan.has_labels)])


def _line(one: Series) -> str:
    plane = one.plane if np.isfinite(one.frames[0].orientation).all() else "-"
    files, b = len({frame.file for frame in one.frames}), " ".join(f"{b:g}" for b in one.b_values) or "-"
    return f"  series {one.number:>4}  {one.role:<12} {plane:<9} {files:>4} files  b {b:<20} {one.reason}"


def _decision(series: Sequence[Series]) -> str:
    """What would be taken, unless one of these turns out to be broken."""
    try:
        sets = diffusion_sets(series, [])
        t2 = axial_t2(series, sets)[0]
    except StudyError as error:
        return f"  fails, {error.code}: {error.message}"
    group = next(one for one in sets if one.first.frame_of_reference == t2.frame_of_reference)
    numbers = {
        "diffusion": group.dwi,
        "calculated b": group.calculated,
        "ADC": group.adc,
    }
    parts = [f"{name} {', '.join(str(one.number) for one in found)}" for name, found in numbers.items() if found]
    return "  takes " + "; ".join([f"T2 {t2.number}", *parts] + ([] if group.adc else ["ADC fitted"]))


def label_lines(labelled: Labelled, given: bool) -> list[str]:
    """What did not fit between labels and studies, by row."""
    if not given:
        return ["No labels: the cohort can be scored, not trained on."]
    rows = ", ".join(map(str, labelled.unused[:10])) + (" ..." if len(labelled.unused) > 10 else "")
    lines = [f"{len(labelled.unused)} rows of the labels have no study (rows {rows})."] if labelled.unused else []
    return lines + labelled.notes


def summary_text(order: Order, outcome: Outcome) -> str:
    """The closing lines: how many, why not, what is missing, where everything lies."""
    states = Counter(row["status"] for row in outcome.rows)
    lines = [
        f"{len(outcome.rows)} studies (layout {outcome.found.layout}): {states['ok']} ok, {states['warn']} with "
        f"warnings, {states['failed']} failed; {outcome.kept} kept from an earlier run."
    ]
    codes = Counter(row["error_code"] for row in outcome.rows if row["error_code"])
    lines += [f"  failed, {code}: {count}" for code, count in codes.most_common()]
    if outcome.has_labels:
        sides = Counter((row["split"], row["label"]) for row in outcome.rows if row["label"] != "")
        lines += [f"  {side or 'no side'}: {sides[side, 1]} positive, {sides[side, 0]} negative"
                  for side in dict.fromkeys(side for side, _ in sorted(sides))]  # fmt: skip
        lines += [f"  {outcome.unlabelled} studies have no label."] if outcome.unlabelled else []
        made = f"The labels give no split: drawn by patients, a quarter for the test, seed {order.seed}."
        lines += [made] if outcome.labelled.split_made else []
    lines += label_lines(outcome.labelled, outcome.has_labels)
    outside = Counter(outcome.found.outside.values())
    lines += [f"  {count} files belong to no study: {reason}" for reason, count in outside.most_common(3)]
    return "\n".join([*lines, f"Look at {order.output / 'qc.html'}, then: --check {order.output}",
                       f"Train: python -m monai.bundle run --config_file configs/prostate_alm.json --cohort "
                       f"{order.output / 'manifest.csv'}"])  # fmt: skip
