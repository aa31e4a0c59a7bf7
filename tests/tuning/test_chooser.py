"""chooser.py: what a machine's own trees say, and profiles whose trees are fitted when they are read."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from autokern.core.problem import Problem
from autokern.core.settings import from_environment
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.chooser import Chooser, fitted, load
from autokern.tuning.profile import SCHEMA, Profile, Timing, Trial

SIZES = (8, 20, 50, 120, 300)


def profile(ratio: float) -> Profile:
    here = host.current()
    timings = {"stock": Timing(1.0), "choleskyqr2": Timing(ratio, ratio)}
    trials = [Trial(Problem(op="qr", m=10 * n, n=n), timings) for n in SIZES]
    return Profile(host=here.fields, fingerprint=here.fingerprint, trials=trials)


@pytest.mark.parametrize("ratio", [2e-3, 0.05, 0.3, 1.0, 9.0, 700.0])
def test_estimates_are_the_ratios_that_were_measured_however_far_from_one(ratio):
    for n in SIZES:
        found = Chooser(fitted(profile(ratio))).estimates(Problem(op="qr", m=10 * n, n=n))["choleskyqr2"]
        assert found.log_ratio == pytest.approx(math.log(ratio), abs=1e-3)
        assert found.sigma == pytest.approx(0.0, abs=1e-3), "equal leaves have no spread, and never a complex one"


def test_trees_of_a_profile_that_an_earlier_version_wrote_are_fitted_and_kept():
    settings, old = from_environment(), msgspec.structs.replace(profile(0.2), schema=1)
    assert store.save(settings, old) is not None
    found = load(settings)
    assert set(found.forests) == {"qr@cpu"}
    kept = store.load(settings, found.fingerprint)
    assert (kept.schema, kept.trials, kept.forests) == (SCHEMA, found.trials, found.forests)
    assert load(settings) == kept


def test_a_file_of_schema_1_is_read(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps(json.loads(msgspec.json.encode(profile(0.2))) | {"schema": 1}))
    found = store.read_file(tmp_path / "old.json")
    assert (found.schema, len(found.trials), found.forests) == (1, len(SIZES), {})
