"""`undertow` whose rank 1 raises in the fourth step, given as the first word: `told` for a mistake, else a fault."""

import os
import sys

from undertow.cli import main
from undertow.config.errors import InputError
from undertow.train.loop import Trainer


def failing(step, kind):
    def taken(trainer):
        if trainer.progress.step == 3:
            raise InputError("this rank has no such file") if kind == "told" else RuntimeError("a fault")
        return step(trainer)

    return taken


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        Trainer.step = failing(Trainer.step, sys.argv[1])
    sys.exit(main(sys.argv[2:]))
