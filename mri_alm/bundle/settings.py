"""What a run's settings may be, which may change between two starts, and which no shared file shows."""

from typing import Any

from mri_alm.errors import InputError

PRIVATE_SETTINGS = (  # no shared file shows them: places, which name people and machines, and names of studies
    "run_dir", "cache_dir", "cohort", "data", "bundle_root", "part", "only_split", "threads", "exclude", "tracking",
    "tracking_uri", "backend", "workers", "ray_address", "gpus_per_task", "save_execute_config",
)  # fmt: skip

FREE_SETTINGS = (  # may change between two starts of one run; the last five are what configs/multi_gpu.json sets
    "allow_outside_paths", "splits", "only_split", "max_fn", "fpr_rule", "threads", "run_dir", "cache_dir",
    "backend", "workers", "ray_address", "gpus_per_task", "tracking", "tracking_uri",
    "device", "local_rank", "replica", "initialize", "finalize",
)  # fmt: skip
PACKAGES = ("mri-alm", "torch", "monai", "SimpleITK", "numpy", "scikit-learn")
_RANGES = {
    "splits": (1, 1000), "max_epochs": (1, 100_000), "batch_size": (1, 100_000), "max_fn": (0, 1_000_000),
    "threads": (1, 1024), "phantom_train": (1, 1_000_000), "phantom_test": (1, 1_000_000),
    "negative_bank": (0, 10_000_000), "workers": (1, 10_000),
}  # fmt: skip
_NUMBERS = (
    "validation", "positive_weight", "gamma", "margin", "mu0_ratio", "rho", "mu_margin", "delta", "learning_rate",
    "weight_decay", "dropout", "beta", "max_margin", "ldam_scale", "gpus_per_task",
)  # fmt: skip
_TRIPLES = ("size", "spacing")


def check_values(config: dict[str, Any]) -> None:
    """Refuse words that the command line took for text, and counts out of range.

    Raises:
        InputError: Naming the setting, its value and the values allowed.
    """
    for name, value in config.items():
        if isinstance(value, str) and value.lower() in ("true", "false", "none", "null"):
            word = value.capitalize() if value.lower() in ("true", "false") else "'$None'"
            raise InputError(f'{name} is the text "{value}". Write {word}.')
    for name, (low, high) in _RANGES.items():
        value = config.get(name)
        if name in config and not _is_expression(value) and not (type(value) is int and low <= value <= high):
            raise InputError(f"{name} must be a whole number from {low} to {high}, got {value}.")
    for name in _NUMBERS:
        if name in config and not _is_expression(config[name]) and not _is_number(config[name]):
            raise InputError(f"{name} must be a number, 0 or more, got {config[name]}.")
    for name in _TRIPLES:
        value = config.get(name, (1, 1, 1))
        if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(_is_number(v) and v > 0 for v in value):
            raise InputError(f'{name} must be three numbers greater than 0, such as "[40, 40, 28]", got {value}.')
    _check_grid(config)
    split = config.get("only_split")
    if split is not None and not (type(split) is int and 0 <= split < config["splits"]):
        raise InputError(f"only_split must be a whole number below splits = {config['splits']}, got {split}.")


def _check_grid(config: dict[str, Any]) -> None:
    features, size = config.get("features"), config.get("size")
    if isinstance(features, list) and size is not None and min(size) < 2 ** len(features):
        raise InputError(
            f"size must be at least {2 ** len(features)}, as each of {len(features)} stages halves it: {size}."
        )


def _is_expression(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("$", "@"))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")
