"""What a run imports, imported: for a process that is forked into runs."""

import atexit
import gc
import os
import signal

with open(os.devnull, "r+b") as nothing:  # it says nothing, and keeps nobody's pipe open when what started it has ended
    for number in range(3):
        os.dup2(nothing.fileno(), number)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner, which ends the forks
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
gc.disable()  # nothing that an import makes is garbage; looking for it takes a fifth of the imports' time

import sklearn.datasets  # noqa: E402, F401  what follows, too, is imported only where a run needs it

import benchmark.backbones.micro  # noqa: E402
import benchmark.run.cli  # noqa: E402, F401

gc.enable()
atexit.register(gc.unfreeze)  # else libraries complain of leaks when the process ends
gc.freeze()  # the forks share these objects with the process that made them, as long as nobody touches them
