"""Ranks of one job share products: values, bits, errors that name a rank. With real processes, so all are slow."""

import threading
from types import SimpleNamespace

import pytest
import torch
from support.rank_jobs import started, told

from autokern.kernels import matmul, tiles
from autokern.kernels.tiles import Plan
from autokern.kernels.tree import Node, Tree
from autokern.system import ranks, threads
from autokern.system.threads import Member

ALONE = Member(0, 1, threading.Barrier(1))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_cover_each_tile_once(ranks, members):
    n, tile, seen = 1000, 60, set()
    for rank in range(ranks):
        turns = tiles.dealt(n, tile, members, ranks, rank)
        for number in range(members):
            own = [pairs[number::members] for pairs in turns]
            places = list(tiles.tiles_of(own, tile, True, ALONE))
            assert seen.isdisjoint(places)
            seen.update(places)
    covered = sum((b - t) * (r - left) * (2 if t != left else 1) for t, b, left, r in seen)
    assert covered == n * n


@pytest.mark.parametrize(("n", "members", "ranks"), [(4096, 1, 2), (5000, 3, 3), (30_000, 4, 8)])
def test_ranks_and_their_threads_have_equal_work(n, members, ranks):
    """Threads wait for each other after each round."""
    for rank in range(ranks):
        turns, work = tiles.dealt(n, 768, members, ranks, rank), 0
        for pairs in turns:
            each = [tiles.tiles_of([pairs[number::members]], 768, True, ALONE) for number in range(members)]
            work += max(sum((b - t) * (r - left) for t, b, left, r in places) for places in each)
        assert work < 1.2 * n**2 / 2 / ranks / members


@pytest.mark.slow
def test_what_differs_between_ranks_is_named_and_ends_no_job():
    found = [told(process) for process in started("rank_program", "usual", 120)]
    for each in found:
        assert each["before"] < 1e-12
        assert "rank 1 in vectors" in each["vectors"]
        assert "rank 1 in points" in each["points"]
        assert "rank 1 in hyperparameters" in each["hyperparameters"]
        assert "rank 1 in kernels" in each["kernels"]
        assert "rank 1 asks for gradients" in each["program"]
        assert each["after"] < 1e-12
    assert found[1]["memory"] == "MemoryError: no more"
    assert "rank 1 failed MemoryError: no more" in found[0]["memory"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_products_over_ranks_are_those_of_one_process(count):
    step = 1 if count == 2 else 5
    each = [told(process) for process in started("rank_sweep", 120, step, count=count)]
    assert all(one == each[0] for one in each)
    found = each[0]["cases"]
    assert each[0]["collectives"] > 3 * len(found)
    bound = {"float64": 1e-10, "float32": 1e-3}  # gradients by hyperparameters are sums that cancel
    assert [case for case, dtype, gap, _, _ in found if not gap < bound[dtype]] == []
    assert [case for case, _, _, same, _ in found if not same] == []
    later, *_ = [told(process)["cases"] for process in started("rank_sweep", 120, 10, count=count)]
    sums = {case: checksum for case, *_, checksum in found}
    assert all(sums[case] == checksum for case, *_, checksum in later)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("way", ["killed", "stopped", "absent"])
def test_a_lost_rank_is_named_on_all_others(way, count):
    *others, last = started("rank_program", way, 6, count=count)
    try:
        each = [told(process) for process in others]
    finally:
        last.kill()
        last.communicate()
    for found in each:
        assert f"rank {count - 1} did not come" in found["error"]
        assert found["seconds"] < 60, "ten times the timeout"
        assert found["again"] == found["error"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({0: "waits", 1: "failed MemoryError: no more"}, "rank 1 failed MemoryError: no more"),
        ({0: "waits", 1: "lost rank 2 is gone"}, "rank 2 is gone"),
        ({0: "waits", 1: "left", 2: "waits"}, "rank 1 ended before the others did"),
        ({0: "waits"}, "ranks 1, 2 did not come: dead, standing still, or running something else"),
        ({0: "waits", 1: "waits", 2: "waits"}, "the connection broke (None)"),
    ],
)
def test_what_ranks_say_tells_which_is_lost(said, told):
    assert ranks._in_words(said, 3, None) == told


@pytest.mark.parametrize("own", [(1, 3), (4, 2), (2, 2)])
def test_ranks_with_unlike_affinities_deal_all_tiles_once(own, monkeypatch):
    """Torch's thread counts are compared when ranks meet; affinity and quota, which bound them, may differ."""
    monkeypatch.setattr(tiles, "_WORK", 64)
    monkeypatch.setattr(matmul, "_sharing", lambda *_: SimpleNamespace(size=2, rank=rank, summed=summed))
    monkeypatch.setattr(threads, "members", lambda device: own[rank])
    x, v = torch.rand(200, 2, dtype=torch.float64), torch.rand(200, 3, dtype=torch.float64)
    tree, plan = Tree(Node("leaf", "matern52"), [x], [], []), Plan(16)

    def summed(kind, sizes, data, like, count, work):
        out = like.new_zeros(count)
        work(out)
        return out

    def objects(mine):
        return [(mine[0], members) for members in own]

    products, gradients = torch.zeros_like(v), torch.zeros_like(x)
    for number in range(2):
        rank = number
        monkeypatch.setattr(matmul, "_rate", 1.0)
        monkeypatch.setattr(matmul, "_members", 1)
        matmul.measure(SimpleNamespace(barrier=lambda: None, objects=objects))
        products += matmul.product(tree, None, v, plan)
        gradients += matmul.gradients(tree, None, v, v, plan)[0][0]
    monkeypatch.undo()
    torch.testing.assert_close(products, matmul.product(tree, None, v, plan))
    torch.testing.assert_close(gradients, matmul.gradients(tree, None, v, v, plan)[0][0])
