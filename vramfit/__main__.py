"""The command line: python -m vramfit {train,estimate,plan,explore,data,calibrate}. The panel's core, not its packages.

Exit code 0: good. 2: the user's input is wrong (one sentence on stderr). 1: our fault.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from vramfit import __version__
from vramfit.commands import calibrate, data, estimate, explore, plan, train
from vramfit.console import use_utf8
from vramfit.engine.threads import let_threads_sleep
from vramfit.errors import UserError

GOOD, OUR_FAULT, WRONG_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"vramfit {options.command}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print(f"vramfit {options.command}: interrupted", file=sys.stderr)
        return OUR_FAULT
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except Exception as error:  # the border: whatever reaches it is a bug of ours
        if os.environ.get("VRAMFIT_DEBUG"):
            traceback.print_exc()
        print(
            f"vramfit {options.command}: unexpected {type(error).__name__}: {error}. "
            "This is a fault of VRAMFit; VRAMFIT_DEBUG=1 shows where.",
            file=sys.stderr,
        )
        return OUR_FAULT
    return GOOD


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all of VRAMFit's commands do, not below a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}. See {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vramfit", description="Train language models on the card you own.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, name, text in (
        (train, "train", "train a run described in a YAML or JSON file"),
        (estimate, "estimate", "VRAM, RAM, disk, time and tokens/s of a run, before it starts"),
        (plan, "plan", "the fastest settings that fit, each with its reason"),
        (explore, "explore", "what a card could train, one model on all cards, memory against length"),
        (data, "data", "what a data set holds and what the model will see of it"),
        (calibrate, "calibrate", "measure what this machine reaches, in about ten seconds, for better estimates"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    use_utf8()
    let_threads_sleep()
    sys.exit(main())
