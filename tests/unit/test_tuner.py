"""The bandit: regret, drift, hysteresis, priors, saved state."""

import json
import random

import pytest

from megatron_tlt.rollout.tuner import BanditTuner, FixedPolicy, TunerConfig, forget_arms
from megatron_tlt.types import OFF, Strategy

ARMS = [
    OFF,
    Strategy(drafter="ngram", num_steps=4, num_draft_tokens=5),
    Strategy(drafter="subnet", num_steps=3, num_draft_tokens=4),
]


def _play(tuner, speeds, *, steps, batch=1, seed=0):
    """Tokens lost against always the best arm, as a fraction of the time."""
    rng = random.Random(seed)
    spent = ideal = 0.0
    for _ in range(steps):
        arm = tuner.select(batch)
        speed = speeds[arm] * rng.lognormvariate(0, 0.15)
        tuner.record(arm, batch=batch, tokens=100, seconds=100 / speed)
        spent += 100 / speeds[arm]
        ideal += 100 / max(speeds.values())
    return spent / ideal - 1


@pytest.mark.parametrize("best", range(3))
def test_regret_is_below_five_per_cent(best):
    speeds = {arm: 100.0 if i == best else 55.0 + 5 * i for i, arm in enumerate(ARMS)}
    assert _play(BanditTuner(ARMS), speeds, steps=2000) < 0.05


def test_it_follows_drift():
    tuner = BanditTuner(ARMS)
    _play(tuner, dict(zip(ARMS, (100.0, 60.0, 80.0), strict=True)), steps=500)
    after = dict(zip(ARMS, (60.0, 60.0, 100.0), strict=True))
    _play(tuner, after, steps=2000, seed=1)
    assert _play(tuner, after, steps=1000, seed=2) < 0.05


def test_buckets_learn_apart():
    tuner = BanditTuner(ARMS, TunerConfig(epsilon=0))
    small = dict(zip(ARMS, (50.0, 100.0, 70.0), strict=True))
    large = dict(zip(ARMS, (100.0, 60.0, 50.0), strict=True))
    _play(tuner, small, steps=50, batch=1)
    _play(tuner, large, steps=50, batch=30)
    assert tuner.select(1) == ARMS[1] and tuner.select(21) == OFF


def test_a_small_gain_does_not_switch():
    tuner = BanditTuner(ARMS[:2], TunerConfig(epsilon=0, margin=0.1, warmup=1))
    for arm, speed in ((OFF, 100), (ARMS[1], 99)):
        tuner.record(arm, batch=1, tokens=speed, seconds=1)
    assert tuner.select(1) == OFF
    for _ in range(50):
        tuner.record(ARMS[1], batch=1, tokens=108, seconds=1)
    assert tuner.select(1) == OFF
    for _ in range(50):
        tuner.record(ARMS[1], batch=1, tokens=112, seconds=1)
    assert tuner.select(1) == ARMS[1]


def test_an_arm_that_cannot_win_is_not_tried_to_the_end():
    """A step of ten times the time brings at most five times the tokens."""
    tuner, seconds = BanditTuner(ARMS, TunerConfig(epsilon=0)), dict(zip(ARMS, (1.0, 10.0, 2.0)))
    tried = []
    for _ in range(12):
        arm = tuner.select(2)
        tried.append(arm)
        tuner.record(arm, batch=2, tokens=2 * (arm.num_steps + 1), seconds=seconds[arm])
    assert tried == [OFF] * 3 + [ARMS[1]] * 2 + [ARMS[2]] * 7
    tuner.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert tuner.select(2) == ARMS[2]
    for _ in range(50):  # the winner becomes so slow that the other may win again
        tuner.record(ARMS[2], batch=2, tokens=8, seconds=100.0)
        tuner.record(OFF, batch=2, tokens=2, seconds=100.0)
    assert tuner.select(2) == ARMS[1]


def test_a_prior_replaces_first_trials():
    prior = {(i, str(arm)): 10.0 + 5 * (arm == OFF) for i in range(4) for arm in ARMS}
    tuner = BanditTuner(ARMS, TunerConfig(epsilon=0), prior=prior)
    assert tuner.select(7) == OFF


def test_saved_state_continues_the_same_choices():
    speeds = dict(zip(ARMS, (80.0, 100.0, 60.0), strict=True))
    one, two = BanditTuner(ARMS), BanditTuner(ARMS)
    _play(one, speeds, steps=100)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.select(1) for _ in range(200)] == [two.select(1) for _ in range(200)]


def test_forgotten_arms_are_tried_anew_and_the_others_keep_what_was_measured():
    tuner = BanditTuner(ARMS)
    _play(tuner, dict(zip(ARMS, (80.0, 100.0, 60.0), strict=True)), steps=100)
    before = tuner.estimate(0, OFF), tuner.estimate(0, ARMS[1])
    tuner.load_state_dict(forget_arms(tuner.state_dict(), ["subnet", "eagle"]))
    assert (tuner.estimate(0, OFF), tuner.estimate(0, ARMS[1])) == before
    assert tuner.estimate(0, ARMS[2]) is None and tuner.select(1) == ARMS[2]


def test_the_elastic_switch_goes_both_ways():
    policy = FixedPolicy(strategy=ARMS[1], max_batch=4)
    assert [policy.select(b) for b in (4, 5, 3)] == [ARMS[1], OFF, ARMS[1]]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        TunerConfig(thresholds=(1, 5, 5))
    with pytest.raises(ValueError, match="at least one arm"):
        BanditTuner(ARMS, arms=[[OFF]])
