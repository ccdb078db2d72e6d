"""Repeat a step from its record: the same operations, equal in every bit, without Python, vmap and autograd.

Open ``recorded_step`` for when a step is recorded, compared and given up; ``recording`` for what is recorded, with
``operations``, ``straight_line`` and ``views`` below it; ``captured_step`` for the CUDA graph; ``attributes`` for
seeing that a method has changed. The rest of the engine knows ``RecordedSteps`` alone, one of its step functions.

torch's own ``make_fx``, with common subexpressions and dead code taken out, was tried instead of the recorder. Its
steps were equal in every bit, and each took longer (FedAvg, PFedPT, FedVPT, PromptFL on a CPU): views of views,
products with one and constants stay, and every operation is looked up by its name in each call.
"""
