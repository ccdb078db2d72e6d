"""Choose how many clients are stepped together, by memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.client_state import momenta_of
from benchmark.engine.cohort import Slots
from benchmark.engine.device.memory import HeldBytes, free_memory
from benchmark.engine.local_training import LocalSteps
from benchmark.engine.mapping import ClientMap
from benchmark.engine.plan.work import Step, on_device
from benchmark.engine.private_step import PrivateSteps
from benchmark.engine.ranks.ranks import dealt
from benchmark.engine.simulation import Simulation
from benchmark.federation import Broadcast, Round
from benchmark.server import ServerRule

#: Widest cohort that ``auto`` picks; beyond it nothing gains.
WIDEST = 64
#: Bytes that a step of stacked clients takes on a CPU at most. Where one client takes as much, arithmetic keeps all
#: cores busy; smaller steps share the cost of starting operations (see ``python -m benchmark.speed widths``).
CPU_STEP = 2**29
#: Cohorts of a rank in a round at most, where ``auto`` makes ranks equally busy.
PIECES = 8


def widest(simulation: Simulation, rule: ServerRule, resident: bool = True) -> int:
    """Choose how many clients go together: what fills 60 % of a GPU's free memory, or ``CPU_STEP`` bytes.

    First the images and what is made of them take their place, so that nothing depends on who asks first; a round's
    uploads, which wait for its end, are left room for.

    Args:
        simulation: whose clients.
        rule: started; sends what a client receives.
        resident: whether the images are gathered on the device, so that they lie there if they fit.
    """
    most, device = min(WIDEST, simulation.terms.participants), simulation.device
    simulation.images.settle(device, resident)
    client = simulation.terms.training_clients[0]
    simulation.store.bring([client])
    numbers = {phase.first_round for phase in simulation.phases[Stage.TRAIN]} or {1}
    received = {n: simulation.received(rule, Round(n, (client,), simulation.terms.seed), (client,)) for n in numbers}

    def fitting(images: int) -> int:
        step, upload = bytes_per_client(simulation, received, images, resident)
        room = CPU_STEP
        if device.type == "cuda":
            room = int(0.6 * free_memory(device)) - upload * simulation.terms.participants
        return max(1, room // step)

    fits = most
    if most > 1:
        # On a CPU a large network's mini-batch takes seconds; one image shows that it is large.
        fits = fitting(1)
        if fits == 1:  # in bfloat16 for the casts of frozen weights, perhaps; they are there now, for all clients
            fits = fitting(1)
    if fits > 1:
        fits = fitting(simulation.terms.lot)
    simulation.store.dismiss()
    return min(most, fits)


def balanced(most: int, sizes: Sequence[int], ranks: int) -> int:
    """Choose how many clients go together where cohorts are dealt to ranks: few enough that all ranks have as much.

    Args:
        most: clients together at most.
        sizes: images of each client of a round.
        ranks: how many.

    Returns:
        ``most`` for one rank, or if nobody trains; else, of some widths below it that cut a round into as many cohorts
        as ranks or a small multiple, the widest with which the busiest rank has at most a tenth more than with the best
        of them.
    """
    if ranks == 1 or not sizes:
        return most
    ordered = sorted(sizes, reverse=True)
    busiest: dict[int, int] = {}
    for pieces in range(1, PIECES + 1):
        width = min(most, -(-len(ordered) // (pieces * ranks)))
        work = [sum(ordered[start : start + width]) for start in range(0, len(ordered), width)]
        loads = [0] * ranks
        for cost, rank in zip(work, dealt(work, ranks), strict=True):
            loads[rank] += cost
        busiest[width] = max(loads)
    return max(width for width, load in busiest.items() if load <= 1.1 * min(busiest.values()))


def bytes_per_client(
    simulation: Simulation, received: Mapping[int, Broadcast], images: int, resident: bool = True
) -> tuple[int, int]:
    """Take two local steps of the first client in each phase, in slots of their own, and watch their memory.

    In the second the momenta are there, and at its end the client has finished, so that its values are set aside.

    Args:
        simulation: whose clients; nothing of it changes.
        received: what the client is sent, by the first round of each phase.
        images: in the client's mini-batch.
        resident: as for ``widest``.

    Returns:
        The most bytes that were held at a time, and those of the client's upload.
    """
    client = simulation.terms.training_clients[0]
    phases = simulation.phases[Stage.TRAIN]
    with simulation.images.precision(), torch.enable_grad(), HeldBytes(simulation.device) as held:
        initial = {name: simulation.method.get_parameter(name) for name in simulation.roles.slots}
        slots = Slots(initial)
        # Mapped in any case, as for several clients: a single one of a method that trains everything is not.
        roles = replace(simulation.roles, has_frozen=True)
        clients = ClientMap(simulation.method, roles, simulation.watch, simulation.clients.merged)
        local_steps = LocalSteps(simulation.method, clients, slots)
        gradients = simulation.steps_of(clients, slots, always_as_written=True)
        if isinstance(gradients, PrivateSteps):
            gradients.noise_multiplier = 1.0  # to count its memory; nothing of these slots leaves them
        optimizers = local_steps.optimizers(phases)
        totals: dict[str, Tensor] = {}
        for first, sent in received.items():  # a round has its own values alone
            round = Round(first, (client,), simulation.terms.seed)
            cohort = simulation.gather((client,), Stage.TRAIN, round, sent, slots.all(), "train")
            for number, (phase, optimizer) in enumerate(zip(phases, optimizers, strict=True)):
                if phase.first_round != first:
                    continue
                momenta = momenta_of(simulation.method, phase, number)
                local_steps.start(phase, optimizer, 1.0, {name: torch.zeros_like(slots.of(name)) for name in momenta})
                for step in (_step(simulation, number, 1, False), _step(simulation, number, images, True)):
                    gathered = step if resident else simulation.images.pool.gathered(step)
                    (placed,) = on_device([gathered], simulation.device)
                    made = gradients(cohort, placed, simulation.mini_batch(placed))
                    local_steps.take(cohort, placed, made, phase, optimizer)
            totals |= {name: total for name, (total, _) in cohort.totals.items()}
            del cohort
    uploads: list[Tensor] = [slots.of(name) for name in simulation.roles.shared + simulation.roles.uploaded]
    uploads += [totals[name] for name in simulation.roles.reported if name in totals]
    return held.most, sum(value.numel() * value.element_size() for value in uploads)


def _step(simulation: Simulation, phase: int, images: int, stopping: bool) -> Step:
    """Make a step of the first client on its first image, taken several times."""
    client = simulation.terms.training_clients[0]
    index = torch.from_numpy(simulation.holdings.train_rows[client][:1]).repeat(images).unsqueeze(0)
    numbers = simulation.images.pool.transform.augment_numbers
    return Step(
        (client,),
        (client,),
        round=1,
        phase=phase,
        stopping=(stopping,),
        index=index,
        mask=torch.ones_like(index, dtype=torch.bool),
        uniform=torch.zeros(1, images, numbers) if numbers else None,
    )
