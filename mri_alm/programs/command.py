"""One command for all programs: ``mri-alm NAME ...``, ``python -m mri_alm NAME ...``, ``python pipelines/NAME.py ...``.

It owns what they share: signals and mistakes end a program in one sentence, with status 130 and 2, and its log goes to
the screen, as text that cannot act there.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from mri_alm.errors import InputError, did_you_mean
from mri_alm.runtime.console import tolerate_any_letter
from mri_alm.runtime.interruption import answer_signals, user_errors


@dataclass(frozen=True)
class Program:
    """A program, and what of it is needed before it has read its arguments.

    Attributes:
        purpose: What it does, in a line.
        module: Of this room.
        prefix: What stands in front of the names ``parser`` and ``main`` in the module, where it holds two programs.
        advice: How to go on after it was stopped; the end of the sentence that says so.
        log: The logger whose messages are shown; of all others the warnings are.
        times: Whether each message has its time in front.
    """

    purpose: str
    module: str
    prefix: str = ""
    advice: str | None = None
    log: str = ""
    times: bool = False

    def part(self, name: str) -> Callable[..., Any]:
        """``"parser"`` or ``"main"``, from the module."""
        found: Callable[..., Any] = getattr(import_module(f"mri_alm.programs.{self.module}"), self.prefix + name)
        return found


AGAIN = "start the same command again"
KEPT = "finished studies are kept; the same command with --resume goes on"
PROGRAMS = {
    "demo": Program("everything once, on the built-in phantom cohort", "demo"),
    "prepare": Program("any export of exams to a checked cohort", "prepare_cohort", advice=KEPT, log="mri_alm"),
    "check": Program("look for faults in a prepared cohort", "prepare_cohort", "check_", advice=AGAIN, log="mri_alm"),
    "train": Program("train, ensemble and threshold: the main job", "train_ensemble"),
    "score": Program("new exams: contrast needed or not", "score", advice=AGAIN),
    "evaluate": Program("scores and labels to figures, tables and a report", "evaluate", advice=AGAIN),
    "report": Program("what a finished training found, and its page", "evaluate", "report_", advice=AGAIN),
    "settings": Program("every setting of the training, with its default", "command", "settings_", advice=AGAIN),
    "inspect": Program("what would a bundle or run execute?", "inspect_bundle", advice=AGAIN),
    "export": Program("share a trained ensemble as a MONAI bundle", "export_bundle", advice=AGAIN),
    "phantom": Program("write a cohort of synthetic exams", "make_phantom"),
    "benchmark": Program("a table of the paper, or of MedMNIST", "benchmark", log="mri_alm.cifar", times=True),
    "sweep": Program("the paper's staged search for settings", "sweep", log="mri_alm.cifar", times=True),
    "completion": Program("print what makes a shell complete this command", "command", "completion_", advice=AGAIN),
}


def parser() -> argparse.ArgumentParser:
    """Of ``mri-alm`` itself: a command, and everything after it is the command's."""
    lines = [f"  {name:<12}{program.purpose}" for name, program in PROGRAMS.items()]
    head = "Which prostate MRI exams need contrast? Research use only.\n\ncommands (mri-alm COMMAND --help says more):"
    text = "\n".join([head, *lines])
    end = "examples:\n  mri-alm demo\n  mri-alm train --cohort data/mine/manifest.csv --run_dir runs/mine\n"
    end += "  mri-alm score --help\n\nexit status: 0 done, 2 something given cannot be used, 130 stopped with Ctrl-C"
    plain = argparse.RawDescriptionHelpFormatter
    use = "mri-alm [-h] [--version] COMMAND ..."
    found = argparse.ArgumentParser("mri-alm", use, description=text, epilog=end, formatter_class=plain)
    found.add_argument("--version", action="version", version=f"mri-alm {version('mri-alm')}")
    found.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    found.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named; the exit status."""
    tolerate_any_letter()
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = parser()
    if not words:
        command.print_help(sys.stderr)
        return 2
    options = command.parse_args(words[:1])
    with user_errors():
        if options.command not in PROGRAMS:
            hint = did_you_mean(options.command, PROGRAMS)
            raise InputError(f'There is no command "{options.command}". {hint}`mri-alm --help` lists them.')
    return _run(PROGRAMS[options.command], f"mri-alm {options.command}", words[1:])


def start_program(name: str) -> None:
    """Run a program as this process, whose command line it takes.

    Args:
        name: Its module, which is its name in ``pipelines/``.
    """
    tolerate_any_letter()
    (program,) = (one for one in PROGRAMS.values() if (one.module, one.prefix) == (name, ""))
    sys.exit(_run(program, sys.argv[0], sys.argv[1:]))


def _run(program: Program, name: str, arguments: Sequence[str]) -> int:
    answer_signals(program.advice)  # before imports that take seconds
    form = "%(asctime)s %(message)s" if program.times else "%(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S")
    if program.log:
        logging.getLogger(program.log).setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="parsing config_file")
    sys.argv = [name, *arguments]  # what usage lines begin with
    try:
        status: int = program.part("main")(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `mri-alm settings | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return status


def add_pool_options(found: argparse.ArgumentParser) -> None:
    """Where a program trains its models: the arguments of :class:`mri_alm.runtime.Pool`."""
    found.add_argument("--workers", type=int, default=1, help="models trained at once (default 1)")
    found.add_argument("--backend", default="loky", choices=["loky", "ray"], help="processes of this machine, or Ray")
    found.add_argument(
        "--ray-address", "--address", help="of a Ray cluster that shares the folders (default: start one here)"
    )
    found.add_argument("--gpus-per-task", type=float, default=0, help="Ray: GPUs of each model")


def settings_parser() -> argparse.ArgumentParser:
    """Of ``mri-alm settings``."""
    text = """Every setting of the training: its default, and what it means. Each may follow `mri-alm train`.

examples:
  mri-alm settings
  mri-alm settings mu0
  mri-alm settings threshold
"""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("word", nargs="?", default="", help="only settings whose name, group or meaning has this word")
    found.add_argument(
        "--of",
        default="prostate_alm",
        choices=["prostate_alm", "inference", "cifar", "medmnist3d"],
        help="the config (default %(default)s)",
    )
    return found


def settings_main(arguments: Sequence[str] | None = None) -> int:
    """List the settings that have a word; the exit status."""
    options = settings_parser().parse_args(arguments)
    with user_errors():
        from mri_alm.bundle.settings import TABLE

        table, word = TABLE[options.of], options.word.lower().lstrip("-").replace("-", "_")
        found = [one for one in table.values() if word in f"{one.name}\n{one.group}\n{one.meaning}".lower()]
        if not found:
            hint = did_you_mean(word, table)
            raise InputError(f'No setting has "{options.word}". {hint}`mri-alm settings` lists them all.')
    print("\n\n".join(_grouped(found)))
    return 0


def _grouped(settings: Iterable[Any]) -> list[str]:
    """A paragraph a group."""
    width = max(40, min(100, shutil.get_terminal_size().columns))
    groups: dict[str, list[str]] = {}
    for one in settings:
        start = str(one.default).partition(".")[0]
        default = {"$@chosen": "the preset's", "$@profiled": "the profile's", "$os": "cores"}.get(start, one.default)
        advice = f" For a real cohort: {one.real}." if one.real else ""
        meaning = re.sub(r"\[(.*?)\]\((.*?)\.md.*?\)", r"\1: docs/\2.md", one.meaning).rstrip(".")
        text = meaning[:1].upper() + meaning[1:] + "." + advice
        lines = [f"  --{one.name}  (default: {default})", *textwrap.wrap(text.replace("`", ""), width - 6)]
        groups.setdefault(one.group, []).append("\n      ".join(lines))
    return ["\n".join([f"{group}:", *lines]) for group, lines in groups.items()]


def completion_parser() -> argparse.ArgumentParser:
    """Of ``mri-alm completion``."""
    text = """Print a script that makes the shell complete commands, options and settings with the tabulator key.

examples:
  mri-alm completion bash > ~/.local/share/bash-completion/completions/mri-alm
  eval "$(mri-alm completion zsh)"     # a line of ~/.zshrc
"""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("shell", choices=["bash", "zsh"])
    return found


def completion_main(arguments: Sequence[str] | None = None) -> int:
    """Print the script of a shell; the exit status."""
    options = completion_parser().parse_args(arguments)
    from mri_alm.bundle.settings import TABLE

    cases = []
    for name, program in PROGRAMS.items():
        shown = [one for one in program.part("parser")()._actions if one.help != argparse.SUPPRESS]
        known = [word for action in shown for word in action.option_strings]
        known += [f"--{setting}" for setting in TABLE["prostate_alm"] if name in ("train", "demo")]
        cases.append(f'    {name}) words="{" ".join(dict.fromkeys(known))}" ;;')
    lines = [
        "_mri_alm() {",
        '  local words="" word="${COMP_WORDS[COMP_CWORD]}"',
        '  case "${COMP_CWORD}:${COMP_WORDS[1]}:$word" in',
        f'    1:*) words="{" ".join(PROGRAMS)} --help --version" ;;',
        '    *:-*) case "${COMP_WORDS[1]}" in',
        *(f"  {case}" for case in cases),
        "    esac ;;",
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _mri_alm mri-alm",
    ]
    if options.shell == "zsh":
        lines.insert(0, "autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print("\n".join(lines))
    return 0
