"""Names and paths that a stranger's manifest may hold: none that leads out of its folder. Settings that are places."""

from pathlib import Path

LOCAL = (  # settings that no shared file shows: places, which name people and machines, and names of studies, which may
    "run_dir", "cache_dir", "cohort", "data", "bundle_root", "part", "split", "threads", "exclude", "tracking",
    "tracking_uri", "backend", "workers", "address", "gpus_per_task", "save_execute_config",
)  # fmt: skip


def is_file_name(text: str) -> bool:
    """Whether a study's name can begin a file's name: printable, no way to another folder, no hidden file."""
    return 0 < len(text) <= 100 and text.isprintable() and not set(text) & set("/\\") and not text.startswith(".")


def wrong_path(column: str, path: Path, folder: Path, *, outside: bool) -> str:
    """What is wrong with a path of a manifest, in words; empty if nothing is.

    Args:
        column: Where it stands.
        path: It, joined to ``folder``.
        folder: The manifest's.
        outside: Whether it may lie outside.
    """
    try:
        if not (outside or path.resolve().is_relative_to(folder.resolve())):
            return (
                f"names {path} in column {column}, outside the manifest's folder. Move it there, or allow it with "
                "--outside True if the manifest is your own."
            )
        if path.exists():
            return ""
    except (OSError, RuntimeError, ValueError):  # a name too long, a circle of links, a zero byte
        pass
    return f"names {path} in column {column}, which does not exist. Correct the path, or list the study under exclude."
