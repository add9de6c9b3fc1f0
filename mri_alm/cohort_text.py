"""What `pipelines/prepare_cohort.py` prints: the table of a dry run, and the closing lines. No names, ever."""

from collections import Counter

from mri_alm.files import secret_of
from mri_alm.labels import Labelled
from mri_alm.prepared_cohort import Order, Outcome, make_plan, read_inputs


def dry_run(order: Order) -> str:
    """A table of the roles of all series and of what is known to be wrong, without reading an image or writing."""
    salt = secret_of(order.output) if (order.output / "salt").exists() else ""
    plan = make_plan(order, read_inputs(order), salt)
    lines = [f"{len(plan.jobs)} studies, layout {plan.found.layout}"]
    for number, job in enumerate(plan.jobs, 1):
        entry = plan.entry(job)
        label = "-" if entry is None or entry.label is None else str(entry.label)
        lines += ["", f"study {job.key if salt else f'#{number}'}   label {label}   {len(job.source.files)} files"]
        lines += [
            f"  series {one.number:>4}  {one.role:<12} {len({f.file for f in one.frames}):>4} files  "
            f"b {' '.join(f'{b:g}' for b in one.b_values) or '-':<20} {one.reason}"
            for one in plan.preparation.roles(job)
        ]
        names = sorted({(role, file.suffix) for file, role in job.source.used.items()})
        lines += [f"  {role:<12} a {ending} file" for role, ending in names]
        lines += [f"  failed: {job.source.error}"] if job.source.error else []
    return "\n".join([*lines, "", *label_lines(plan.labelled, plan.has_labels)])


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
