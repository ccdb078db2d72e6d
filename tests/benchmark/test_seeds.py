import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmark.seeds import (
    derived_seed,
    keyed_bits,
    keyed_initialization,
    keyed_uniform,
    numpy_generator,
    torch_generator,
)


def test_a_key_has_one_seed_in_every_process() -> None:
    """In a process with other hashes, too."""
    hashes = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    code = "from benchmark.seeds import derived_seed; print(derived_seed(0, 'order', 3))"
    seen = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True
    ).stdout
    assert seen == f"{derived_seed(0, 'order', 3)}\n"


def test_parts_are_told_apart() -> None:
    keys = [(0, 1), (1, 0), (0, "1"), ("0", "1"), (0, "a", "b"), (0, "ab"), (10,), (1, 0, 0)]
    assert len({derived_seed(*key) for key in keys}) == len(keys)


def test_floats_are_refused() -> None:
    with pytest.raises(TypeError, match=r"integer or a string, got 0\.5"):
        derived_seed(0.5)  # type: ignore[arg-type]


def test_generators_depend_on_their_key_alone() -> None:
    torch.manual_seed(1)
    first = torch.rand(3, generator=torch_generator(0, "x")), numpy_generator(0, "x").random(3)
    torch.rand(10)
    again = torch.rand(3, generator=torch_generator(0, "x")), numpy_generator(0, "x").random(3)
    assert torch.equal(first[0], again[0])
    assert (first[1] == again[1]).all()


def test_initial_values_depend_on_seed_and_key_and_leave_global_draws_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with keyed_initialization("head"):
        first = torch.nn.Linear(2, 2).weight.detach()
    assert torch.equal(torch.rand(2), expected)
    with keyed_initialization("head"):
        assert torch.equal(torch.nn.Linear(2, 2).weight.detach(), first)
    torch.manual_seed(6)
    with keyed_initialization("head"):
        assert not torch.equal(torch.nn.Linear(2, 2).weight.detach(), first)


def test_keyed_bits_are_the_stream_of_splitmix64() -> None:
    # The first numbers of the published generator from this state.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert keyed_bits(1234567, np.arange(5)).tolist() == expected


def test_each_counter_starts_its_own_stream_whatever_is_drawn_beside_it() -> None:
    table = keyed_bits(7, np.arange(3)[:, None], np.arange(4))
    assert table.shape == (3, 4)
    for counter in range(3):
        state = int(keyed_bits(7, np.array([counter]))[0])
        assert keyed_bits(state, np.arange(4)).tolist() == table[counter].tolist()
    assert len(set(table.flatten().tolist()) | set(keyed_bits(8, np.arange(3)[:, None], np.arange(4)).flat)) == 24


def test_keyed_uniform_numbers_are_the_upper_bits() -> None:
    expected = [(bits >> 11) / 2**53 for bits in keyed_bits(1234567, np.arange(5)).tolist()]
    assert keyed_uniform(1234567, np.arange(5)).tolist() == expected
    drawn = keyed_uniform(7, np.arange(100_000))
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
