"""`compare` runs a function, and ``%%autokern`` a cell, without and with autokern."""

import gpytorch
import pytest
import torch
from support.losses import single

import autokern
from autokern.evaluation import compared


def test_a_function_runs_without_and_with_autokern_in_turn():
    seen = []

    def run():
        seen.append(autokern.is_enabled())
        mll = single(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
        return mll(mll.model(*mll.model.train_inputs), mll.model.train_targets), [1.0, "text"]

    found = autokern.compare(run, rounds=2)
    assert sorted(seen) == [False] * 3 + [True] * 3
    assert len(found.off) == len(found.on) == 2
    assert 0 <= found.difference < 1e-12
    assert not autokern.is_enabled()


@pytest.mark.parametrize(
    ("off", "on", "difference", "told"),
    [
        (2.0, 1.0, 1e-9, "2.00 times as fast: 2.00 s by the library, 1.00 s by autokern; results agree within 1e-09"),
        (1.0, 2.0, 0.0, "2.00 times as slow: 1.00 s by the library, 2.00 s by autokern; results are the same"),
        (1.0, 1.0, None, "1.00 times as fast: 1.00 s by the library, 1.00 s by autokern"),
    ],
)
def test_the_sentence(off, on, difference, told):
    assert str(autokern.Compared([off], [on], difference)) == told
    busy = autokern.Compared([off], [on], difference, "others use 1.9 of 2 cores")
    assert str(busy) == f"{told}; meanwhile others use 1.9 of 2 cores: times are of a busy machine"


def test_results_without_numbers_or_of_other_shapes_have_no_difference():
    assert autokern.compare(lambda: None, rounds=1).difference is None
    assert "agree" not in str(autokern.compare(lambda: None, rounds=1))
    kinds = iter(range(9))
    assert autokern.compare(lambda: torch.zeros(next(kinds)), rounds=1).difference is None


def test_what_cannot_be_compared_says_so(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        autokern.compare(lambda: 1 / 0)
    assert not autokern.is_enabled()
    monkeypatch.setenv("AUTOKERN", "0")
    with pytest.raises(autokern.SettingsError, match="AUTOKERN=0"):
        autokern.compare(lambda: None)


def test_where_it_is_enabled_already_it_is_off_for_the_librarys_turns_only():
    seen = []
    import autokern.auto as first

    autokern.enable()
    try:
        autokern.compare(lambda: seen.append(autokern.is_enabled()), rounds=1)
        with pytest.raises(ZeroDivisionError):
            autokern.compare(lambda: 1 / 0)
        assert sorted(seen) == [False, False, True, True]
        assert autokern.is_enabled()
        import autokern.auto as second

        assert second is first, "importing it again does not enable once more"
    finally:
        autokern.disable()
        assert autokern.is_enabled(), "it was enabled twice"
        autokern.disable()
    assert not autokern.is_enabled()


@pytest.mark.parametrize(("short", "runs"), [(10.0, [False, True, False, True]), (0.0, [False, True])])
def test_a_cell_runs_each_way_and_leaves_the_names_of_the_last_run(capsys, monkeypatch, short, runs):
    monkeypatch.setattr(compared, "_SHORT", short)

    class Shell:
        def __init__(self):
            self.user_ns = {"count": [], "autokern": autokern}

        def register_magic_function(self, function, kind, name):
            assert (kind, name) == ("cell", "autokern")
            self.magic = function

    shell = Shell()
    autokern.load_ipython_extension(shell)
    shell.magic("", "count.append(autokern.is_enabled())\nlast = len(count)")
    assert shell.user_ns["count"] == runs
    assert shell.user_ns["last"] == len(runs)
    assert "by the library" in capsys.readouterr().out
