"""Programs of several ranks under `autokern run`: unchanged scripts, groups of their own, and the choice to share."""

import io
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.programs import python
from support.rank_jobs import started, told

import autokern
from autokern.core.errors import SettingsError
from autokern.runtime.ranks import facts as facts_of_this
from autokern.runtime.ranks import unlike
from autokern.system import ranks

SUPPORT = Path(__file__).parents[1] / "support"
FORCED = {"AUTOKERN_FORCE": "kernel_matmul=distributed", "AUTOKERN_RANKS": "120"}
RUN = ("-m", "autokern", "run", SUPPORT / "rank_script.py")


def printed(count: int, *words: object, **environment: str) -> list[str]:
    """Run Python by these words in so many ranks; return the lines that tell what was found."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, "--no-python"]
    with tempfile.TemporaryDirectory() as keops:  # a folder for each rank, as in support.rank_jobs
        apart = ["sh", "-c", f'KEOPS_CACHE_FOLDER={keops}/$RANK exec "$0" "$@"', sys.executable]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = python(*([*torchrun, *apart] if count > 1 else []), *words, **threads, **environment)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^found .*$", done.stdout, re.MULTILINE)


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.split()[1:3]]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["unseeded"]], ids=["seeded", "unseeded"])
def test_a_script_that_knows_nothing_of_ranks_shares_its_products_and_draws_the_same_numbers(words):
    first, second = printed(2, *RUN, *words, **FORCED)
    assert first == second
    assert "distributed" in first
    assert words or numbers(first) == pytest.approx(numbers(printed(1, *RUN)[0]), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_densities_predictions_and_samples_over_ranks_are_those_of_one_process(count):
    (alone,), both = ([told(process) for process in started("rank_models", 120, count=many)] for many in (1, count))
    assert all(one == both[0] for one in both)
    assert set(both[0]["used"]["kernel_matmul"]) == {"distributed"}
    assert both[0]["used"]["solve"] == alone["used"]["solve"] == {"preconditioned": 3}
    assert both[0]["collectives"] > 50
    for served in ("pivoted", "vecchia"):
        assert both[0][f"of {served}"] == alone[f"of {served}"] == served
    for name in ("pivoted", "vecchia", "mean", "variance", "samples", "derivative"):
        assert both[0][name] == pytest.approx(alone[name], rel=1e-8, abs=1e-10 * max(map(abs, alone[name]))), name
    one, first = (torch.load(io.BytesIO(bytes.fromhex(found["saved"]))) for found in (alone, both[0]))
    torch.testing.assert_close(first["model"], one["model"], rtol=1e-8, atol=1e-10)
    # in single precision, products are rounded by the order of their sums, and solutions are to a residual of 1e-5
    assert both[0]["single"] == pytest.approx(alone["single"], abs=1e-5)


@pytest.mark.slow
def test_a_program_with_a_group_of_its_own_is_left_alone():
    first, second = printed(2, *RUN, "own")
    assert "distributed" not in first + second


@pytest.mark.slow
def test_processes_that_a_rank_starts_are_no_ranks_and_end():
    assert printed(2, SUPPORT / "rank_children.py", AUTOKERN_RANKS="on") == ["found True 3 None"] * 2


@pytest.mark.slow
def test_ranks_whose_orders_disagree_take_those_of_rank_0():
    found = printed(2, SUPPORT / "rank_orders.py")
    within = {line for line in found if " never " in line}
    assert len(within) == 1, found
    assert "(('cholesky', 'stock'),)" in within.pop()
    assert {"found cholesky", "found qr"} < set(found)
    assert found.count("found before stock") == found.count("found before tiled") == 1
    assert found.count("found decision tiled") == 2


def test_a_process_that_is_one_alone_has_no_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not ranks.is_job()
    assert ranks.active() is None
    with pytest.raises(SettingsError, match="torchrun"), autokern.ranks():
        pass


def test_ranks_that_differ_are_named():
    def facts(threads: int) -> dict[str, object]:
        return {"common": {"torch": "2.13", "threads": threads}}

    assert facts_of_this()["common"]["autokern"] == autokern.__version__
    assert unlike([facts(1), facts(1)]) == ""
    assert unlike([facts(1), facts(1), facts(4)]) == "rank 2 has threads 4, rank 0 1"


class _Ranks:
    """Four ranks whose links cost nothing."""

    size, link = 4, ranks.Link(1e-4, 1e12)

    def mine(self):
        return True


def test_the_candidate_is_chosen_where_links_cost_less_than_they_save(monkeypatch):
    def shared(n: int = 20_000) -> bool:
        found = autokern.explain("kernel_matmul", m=n, n=n, d=3, rhs=11, variant="rbf/same")
        return found.candidate == "distributed"

    assert not shared()
    ranks.held = _Ranks()
    try:
        assert shared()
        assert not shared(1000)
        monkeypatch.setattr(_Ranks, "link", ranks.Link(1e3, 1e3))
        assert not shared()
    finally:
        ranks.held = None
