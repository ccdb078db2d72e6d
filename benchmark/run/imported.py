"""Import what a run imports, in a process that is forked into runs."""

import atexit
import gc
import os

#: What the runner gave; some libraries set variables while they are imported.
GIVEN = dict(os.environ)
# This process says nothing, and keeps no pipe of the runner's open after the runner has ended.
nothing = os.open(os.devnull, os.O_RDWR)
for number in range(3):
    os.dup2(nothing, number)
if nothing > number:
    os.close(nothing)
gc.disable()  # nothing that an import makes is garbage; looking for it takes a fifth of the imports' time

import sklearn.datasets  # noqa: E402  what follows, too, is imported only where a run needs it
import sklearn.model_selection  # noqa: E402, F401

import benchmark.backbones.micro  # noqa: E402
import benchmark.run.cli  # noqa: E402, F401
from benchmark.records.source_code import remember_loaded  # noqa: E402

remember_loaded()
gc.enable()
atexit.register(gc.unfreeze)  # else libraries complain of leaks when the process ends
gc.freeze()  # the forks share these objects with the process that made them, as long as nobody touches them
