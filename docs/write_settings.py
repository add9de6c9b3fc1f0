"""Write docs/settings.md from the table of settings: `make settings`. A test says when it was forgotten."""

from pathlib import Path

from mri_alm.bundle.settings import CHOICES, PROFILES, TABLE, Setting

PAGE = Path(__file__).with_name("settings.md")
TITLES = {
    "prostate_alm": "configs/prostate_alm.json",
    "inference": "configs/inference.json",
    "cifar": "configs/cifar*.json",
    "medmnist3d": "configs/medmnist3d.json",
}
WORDS = {"$os.cpu_count()": "cores", "$mri_alm.scoring.salt_of(@trained.folder, @salt_file)": "your own"}
HEAD = """# Settings

<!-- Written from mri_alm/bundle/settings.yaml by `make settings`; not to be edited by hand. -->

Each is a line at the top of its config and follows the command as `--name value`. Python's spelling: `True`, `False`,
`"[2, 2, 3]"`; `None` as `'$None'`, since MONAI drops a bare `None`. A name that does not exist is refused with the
nearest one that does; an old name is understood, with a hint.

**Free** settings may change between two starts of one run folder; any other change is refused, with what changed. A
setting that did not exist when a run was made counts as its default. The column *real cohort* says what to choose in
place of the default, which fits the phantom. Every setting has an anchor: [`settings.md#splits`](#splits) leads to
`splits`.

`pipelines/score.py` sets those of `configs/inference.json` from its arguments; as a MONAI bundle,
`python -m monai.bundle run --config_file configs/inference.json` takes them after the command.

## The ones asked for most

| setting | meaning |
|---|---|
| `--splits 3`, `--only_split 4` | fewer splits; only split 4 (on a cluster: one job each, then once without `--only_split`) |
| `--max_fn 1` | held-out positives the threshold may miss; may be changed after training, nothing is trained again |
| `--positives_per_batch '$None'` | batches as they come, in place of two positives in each where few exams are positive ([what that is worth](plain_bce.md#batches)) |
| `--mu0 0` | no constraints: the base loss alone, for comparison |
| `--loss a_fl --gamma 2` | another base loss |
| `--preset official_2022` | the choices of the authors' code in place of the paper's ([table](method.md#paper-the-authors-code-and-this-projects-default)); each can be set alone |
| `--profile clinical` | a finer grid and a larger network at once ([what it costs](performance.md)); each value can be set alone |
| `--optimiser adamw --schedule cosine --warmup 2` | AdamW, with a learning rate that rises for two epochs and falls along half a cosine |
| `--checkpoint_rule best --patience 10` | keep the epoch of the highest validation AUC, and stop when that has not risen for ten epochs |
| `--run_dir runs/x` | another run; a folder is never mixed with other settings |
"""


def page() -> str:
    """The page as Markdown."""
    text = HEAD
    for config, settings in TABLE.items():
        text += f"\n## {TITLES[config]}\n"
        for group in dict.fromkeys(setting.group for setting in settings.values()):
            text += f"\n### {group}\n\n| setting | default | real cohort | meaning |\n|---|---|---|---|\n"
            text += "".join(row(setting, config) for setting in settings.values() if setting.group == group)
    return text


def row(setting: Setting, config: str) -> str:
    """Its line, to which `settings.md#NAME` leads, in another config than the main one `#CONFIG-NAME`."""
    anchor = setting.name if config == "prostate_alm" else f"{config}-{setting.name}"
    preset, profiled = (str(setting.default).startswith(start) for start in CHOICES)
    default = "of the preset" if preset else WORDS.get(str(setting.default), f"`{setting.default}`")
    if profiled:
        default = ", ".join(f"`{getattr(one, setting.name)}` ({name})" for name, one in PROFILES.items())
    free = " (free)" if setting.free else ""
    return f'| <a id="{anchor}"></a>`{setting.name}` | {default} | {setting.real} | {setting.meaning}{free} |\n'


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
