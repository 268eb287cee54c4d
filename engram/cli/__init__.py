"""The command line: `report`, `check` and `train`, all three of them where no command is given, `inspect`, `plan` and
`bench`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import engram
from engram.cli import bench, check, inspect, plan, report, train
from engram.cli.answer import Answer, Parser, answer

DESCRIPTION = """\
The Engram layer for PyTorch. Without a command: print what this installation is, check every operator on every device
against the float64 reference, then train two small language models, one with and one without the Engram layer, on real
text (see `engram train --help`)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 good, 1 a check or the training failed, 2 wrong usage,
    130 and 143 after Ctrl-C and SIGTERM."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        argv = ["all", *argv]
    if argv[0] == "bench":  # its options belong to the source tree
        return bench.main(argv[1:])
    return answer("engram", lambda: run(argv), as_json="--json" in argv)


def run(argv: Sequence[str]) -> Answer:
    """Exit status and record of a command. Raises UsageError for what the user can put right."""
    options = build_parser().parse_args(argv)
    done: Answer = options.run(options)
    return done


def build_parser() -> Parser:
    # Whole names only: --json is looked for before anything is parsed.
    parser = Parser(prog="engram", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"engram {engram.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shared = Parser(add_help=False)
    shared.add_argument("--json", action="store_true",
                        help="print one JSON object and nothing else; what else there is to say goes to stderr")

    def add(
        name: str, run: Callable[[argparse.Namespace], Answer], help: str,
        *add_options: Callable[[argparse.ArgumentParser], None], description: str = "", **options: Any,
    ) -> None:
        command = commands.add_parser(
            name, help=help, description=description or help, parents=[shared], allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter, **options,
        )
        for function in add_options:
            function(command)
        command.set_defaults(run=run)

    add("report", report.run, "print what this installation is: version, torch, compiler, instruction set, CUDA")
    add("check", check.run, "check every operator, forward and backward, against the float64 reference",
        check.add_options)
    add("train", train.run, "train two small language models, with and without Engram, and compare them",
        train.add_options, description=train.DESCRIPTION, epilog=train.EPILOG)
    add("inspect", inspect.run, "print sizes, collisions and gates of a configuration or checkpoint",
        inspect.add_options, description=inspect.DESCRIPTION, epilog=inspect.EPILOG)
    add("plan", plan.run, "memory, traffic and time of tables spread over ranks, on paper", plan.add_options,
        description=plan.DESCRIPTION)
    commands.add_parser("bench", help="measure speed and accuracy against plain PyTorch (needs the source tree)")
    add("all", run_all, "report, check, then train (what happens without a command); takes the options of train",
        train.add_options, epilog=train.EPILOG)
    return parser


def run_all(options: argparse.Namespace) -> Answer:
    """Report, check and train; a failed check ends it."""
    _, build = report.run(options)
    print()
    status, checks = check.run(options)
    if status:
        return status, {"build": build, "check": checks}
    print()
    status, training = train.run(options)
    return status, {"build": build, "check": checks, "train": training}
