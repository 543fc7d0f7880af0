"""torchrec's pooled embeddings under a recipe: what arrives is what was quantized, in its format's bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from narrowgate.precision import quantize
from narrowgate.precision.spec import Spec

pytest.importorskip("torchrec")


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module, for its cases."""
    return load_script("torchrec_ranks")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("torchrec")
    run_script("torchrec_ranks", folder, limit=180)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def rounded(x: torch.Tensor, spec: str, width: int) -> torch.Tensor:
    return quantize(x.reshape(-1, width).contiguous(), Spec.parse(spec), dim=1).dequantize().view(x.shape)


@pytest.mark.parametrize("case", ["fp32", "bf16", "fp8", "fp8_random"])
def test_pooled_rows_are_torchrecs_rounded(ranks: list[Any], script: ModuleType, case: str) -> None:
    for found in ranks:
        whole = found["torchrec"]["pooled"]
        assert torch.equal(found[case]["pooled"], rounded(whole, script.FORMATS[case][0], script.WIDTH))


@pytest.mark.parametrize("case", ["fp32", "bf16", "fp8"])
def test_gradients_of_tables_are_of_rounded_ones(ranks: list[Any], script: ModuleType, case: str) -> None:
    """A gradient that a table adds up is linear in what arrives, so its error is that of the rounding."""
    spec = Spec.parse(script.FORMATS[case][1])
    bound = {"fp32": 1e-6, "bf16": 2.0**-8, "fp8_e5m2": 2.0**-2}[spec.fmt.name]
    for found in ranks:
        plain, low = found["torchrec"]["gradient"], found[case]["gradient"]
        error = float((low - plain).norm() / plain.norm())
        assert error < bound
        assert case == "fp32" or error > bound / 16


def test_stochastic_gradients_differ_from_nearest_ones(ranks: list[Any]) -> None:
    for found in ranks:
        assert not torch.equal(found["fp8"]["gradient"], found["fp8_random"]["gradient"])
        error = found["fp8_random"]["gradient"] - found["torchrec"]["gradient"]
        assert float(error.norm() / found["torchrec"]["gradient"].norm()) < 2.0**-2


def test_bytes_are_those_of_the_formats(ranks: list[Any], script: ModuleType) -> None:
    for rank, found in enumerate(ranks):
        # Rows of this rank's table for the batches of all ranks go out, and gradients of the own rows of all tables.
        forward, backward = script.RANKS * script.ROWS * script.WIDTHS[rank], script.ROWS * sum(script.WIDTHS)
        sent = {case: dict(found[case]["bytes"]) for case in script.FORMATS}
        values = {case: {k[1]: v for k, v in b.items() if k[1] != torch.int64} for case, b in sent.items()}
        assert values["torchrec"] == values["fp32"] == {torch.float32: 4 * (forward + backward)}
        assert values["bf16"] == {torch.bfloat16: 2 * (forward + backward)}
        scales = 4 * (forward + backward) // script.WIDTH
        assert values["fp8"] == values["fp8_random"] == {torch.uint8: forward + backward + scales}


@pytest.mark.parametrize("case", ["fp32", "bf16", "fp8"])
def test_tables_split_by_rows_are_added_up_in_the_format_or_as_they_are(ranks: list[Any], case: str) -> None:
    for found in ranks:
        plain, low = found["split"]["torchrec"], found["split"][case]
        for part in ("pooled", "gradient"):
            error = float((low[part] - plain[part]).norm() / plain[part].norm())
            assert error < (2.0**-7 if case == "bf16" else 1e-6)
            assert case != "bf16" or error > 2.0**-11


def test_where_torchrec_would_differentiate_codes_it_is_told_not_to(ranks: list[Any]) -> None:
    for found in ranks:
        assert "expected set_use_sync_collectives(False), or fp32 or bf16 in shards.tables" in found["refused"]
