"""The help text of ``lightning-cli`` and its commands; imports no library, so that ``--help`` answers at once."""

import argparse
import sys
from typing import Any

from benchmark.shipped import version

#: What stands in front of ``fit``, in a process of this environment.
PROGRAM = (sys.executable, "-m", "benchmark.run.cli")
DESCRIPTION = "Personalized federated prompt learning on images: runs of one method on one federation, recorded."

COMMANDS = {
    "fit": "train a method on a federation, score it after every round and record it",
    "validate": "score what a run has learned on the held-out part of the training images (data.val_fraction)",
    "test": "score what a run has learned on every client's test images",
}

#: Options of a command, and what the dotted names of others begin with.
GROUPS = (
    "config", "data", "delivery", "help", "model", "print_config", "run_dir", "seed_everything", "server", "trainer",
    "tuning", "ckpt_path", "verbose", "print_shtab", "optimizer", "lr_scheduler", "weights_only",
)  # fmt: skip

#: What other programs call an option.
OTHER_WORDS = {
    "rounds": "trainer.max_epochs",
    "num_rounds": "trainer.max_epochs",
    "global_rounds": "trainer.max_epochs",
    "epochs": "trainer.max_epochs (rounds) or model.init_args.training.epochs (of a client in a round)",
    "local_epochs": "model.init_args.training.epochs",
    "lr": "model.init_args.training.lr",
    "learning_rate": "model.init_args.training.lr",
    "seed": "seed_everything",
    "dataset": "data.source",
    "method": "model",
    "algorithm": "model",
    "output": "run_dir",
    "output_dir": "run_dir",
}

OPTIONS = (
    "Options can stand in files, as --config FILE or by a name that `benchmark configs` lists; later files win, and "
    "options win over files. "
    "Classes to choose from: --model.help, --data.source.help, --data.partition.help, --server.help; what one takes: "
    "--model.help FedVPT."
)

EXAMPLES = """\
examples:
  lightning-cli fit --config fedvpt_digits --run_dir=runs/one
  lightning-cli fit --config methods/moon --config suites/digits --trainer.max_epochs=20
  lightning-cli test --run_dir=runs/one
  lightning-cli fit --model.help             # the methods; --model.help MOON what one takes
  lightning-cli fit --help                   # every option

Tables, figures and what was recorded: benchmark --help
"""

#: Arguments of jsonargparse's parsers, by command; the rest is the program's.
PARSERS: dict[str, Any] = {"description": DESCRIPTION} | {
    name: {
        "description": f"{said[0].upper()}{said[1:]}. {OPTIONS}",
        "usage": f"lightning-cli {name} [--config FILE ...] [--OPTION=VALUE ...]",
    }
    for name, said in COMMANDS.items()
}


def overview() -> argparse.ArgumentParser:
    """The program and its commands, without their options."""
    top = argparse.ArgumentParser(
        prog="lightning-cli",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {version()}", help="print it and exit")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, said in COMMANDS.items():
        commands.add_parser(name, help=said)
    return top
