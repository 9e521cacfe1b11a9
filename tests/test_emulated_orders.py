"""Kernels give the same bits in whatever order threads run: so what is not waited for is found.

On a GPU compute-sanitizer's racecheck looks for the like, in shared memory alone.
"""

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import changing_sizes
import emulation
import engine_cases
import option_draws
import test_emulated
from test_emulated import (  # noqa: F401  # collected here too
    test_both_directions_of_float32_where_blocks_exchange,
    test_layers_spread_over_blocks_that_exchange,
    test_plain_layers,
    test_products_of_four_warps,
    test_products_of_four_warps_backward,
    test_products_of_what_has_come_while_the_rest_is_on_its_way,
    test_sequences_of_many_lengths_in_sub_tiles,
    test_states_that_change_their_size_from_step_to_step,
    test_sub_tiles_that_travel_while_others_are_computed,
)
from test_staged import (  # noqa: F401
    test_a_step_of_several_stages,
    test_a_step_of_several_stages_where_blocks_exchange_through_l2,
    test_random_steps_with_products_where_blocks_exchange_through_l2,
    test_words_come_round_in_their_places,
)

RESULTS: list[tuple[Any, str, Callable[..., str]]] = [
    (test_emulated, "outcome", lambda layer, x, dtype, engine, *rest: engine),
    (option_draws.Drawn, "results", lambda case, layer, *rest: layer.engine),
    (changing_sizes, "outputs", lambda layer, dtype, engine, *rest: engine),
    (engine_cases, "results", lambda form, call, engine, *rest: engine),
]
"""Where tests find what an engine gives, and of which engine."""


ORDERS = 1
"""How many others each test tries."""


@pytest.fixture(autouse=True)
def again_in_another_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    first = zlib.crc32(request.node.name.encode()) + 1

    def in_both(function: Callable[..., dict[str, Tensor]], of: Callable[..., str]) -> Callable[..., dict[str, Tensor]]:
        def both(*given: Any, **more: Any) -> dict[str, Tensor]:
            drawn = torch.get_rng_state()
            found = function(*given, **more)
            for order in range(first, first + ORDERS) if of(*given) == "persistent" else ():
                torch.set_rng_state(drawn)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(emulation, "ORDER", order)
                    again = function(*given, **more)
                assert [name for name in found if not torch.equal(found[name], again[name])] == []
            return found

        return both

    for place, name, of in RESULTS:
        monkeypatch.setattr(place, name, in_both(getattr(place, name), of))


def of_four_warps(folder: Path, patch: pytest.MonkeyPatch) -> None:
    parts = (64, 2, 1, 8, 8, 4)
    test_products_of_what_has_come_while_the_rest_is_on_its_way(780, 3, parts, "bfloat16", "tanh", folder, patch)


def of_clusters(folder: Path, patch: pytest.MonkeyPatch) -> None:
    tiles, options = ((2, 3, 4, 3, 2), (2, 3, 8, 3)), "lengths mask reset states"
    test_sequences_of_many_lengths_in_sub_tiles("LSTM", 40, 45, 2, torch.float16, *tiles, options, 1, 1, folder, patch)


def of_groups(folder: Path, patch: pytest.MonkeyPatch) -> None:
    tiles = (4, 3, 2, 3, 2, 2), (4, 3, 8, 3)
    test_sequences_of_many_lengths_in_sub_tiles(
        "LSTM", 120, 21, 1, torch.bfloat16, *tiles, "lengths initial", 1, 1, folder, patch
    )


def of_levels(folder: Path, patch: pytest.MonkeyPatch) -> None:
    ahead, back, relu = (8, 2, 1, 8, 1), (16, 4, 3, 1, 8), dict(nonlinearity="relu")
    test_layers_spread_over_blocks_that_exchange("RNN", 45, 25, 36, ahead, back, relu, "tf32", folder, patch)


def of_changing_sizes(folder: Path, patch: pytest.MonkeyPatch) -> None:
    tile = (4, 3, 2, 3, 2, 2)
    test_states_that_change_their_size_from_step_to_step(120, 21, tile, False, folder, patch)


def of_products_in(place: int, name: str = "several_of_a_gate") -> Callable[[Path, pytest.MonkeyPatch], None]:
    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        test_words_come_round_in_their_places(place, name, folder, patch)

    return run


FAULTS = {
    "a part of the states is multiplied before all threads have brought it": (
        "show_products();\n              __syncthreads();", "show_products();", of_four_warps,
    ),
    "the cell is computed before all sums are there": (
        "      __syncthreads();\n\n      float given[OWN][2][GATES]", "      float given[OWN][2][GATES]", of_four_warps,
    ),
    "a group's states are multiplied before they have come": (
        "d < ARRIVALS && !again) await", "d < ARRIVALS && turn == 0) await", of_groups,
    ),
    "states come by the barrier of another group": ("GROUPS - 1 - group : 0;", "group : 0;", of_groups),
    "all states count as of the usual scale": ("__any_sync(0xffffffffu, unusual)", "false", of_changing_sizes),
    "a scale stays in the states' words": ("word & kept", "word", of_changing_sizes),
    "what a scale is the inverse of is never made free in the ring": (
        "+ level_at, NOTHING);", "+ level_at, 0u);", of_levels,
    ),
    "a warp waits for which nobody waits, and a barrier passes it by": (
        "if (goes_on(sub) && has_strips) {", "if (goes_on(sub)) {", of_clusters,
    ),
    "a product inside the step begins before all warps have brought what enters it": (
        "phase, part);\n          __syncthreads();\n", "phase, part);\n", of_products_in(1),
    ),
    "what enters the next product takes the place of what is still multiplied": (
        "multiply_round(round, sub);\n          __syncthreads();\n", "multiply_round(round, sub);\n", of_products_in(1),
    ),
    "two products have one ring": ("first_seen + round * round_pitch", "first_seen + round_pitch", of_products_in(0)),
    "of what entered a product, a place in the ring is never made free": (
        "round <= INSIDE; ++round) put(at", "round < INSIDE; ++round) put(at", of_products_in(0, "gru_before"),
    ),
    "parts of the batch have one place in the ring": (
        "round * round_pitch + sent_at + sub * ROWS * PITCH", "round * round_pitch + sent_at", of_products_in(3),
    ),
    "gradients of two gates are gathered from one place": (
        "round == 0 ? 0 : LEAVES + round - 1", "round == 0 ? 0 : LEAVES", of_products_in(1),
    ),
    "gradients are multiplied where others are written": (
        "product(t, turn, round);\n      place_now = 1 - place_now;", "product(t, turn, round);", of_products_in(0),
    ),
    "sums of two products have one place": (
        "arriving + round * round_plane", "arriving + round_plane", of_products_in(0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (right, wrong, run), on_host, changed = FAULTS[fault], emulation.on_host, []

    def faulty(source: str) -> str:
        changed.append(right in source)
        return on_host(source.replace(right, wrong))

    monkeypatch.setattr(emulation, "on_host", faulty)
    monkeypatch.setattr(sys.modules[__name__], "ORDERS", 8)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        run(folder, patch)
    assert any(changed)
