import pytest

from embedgeo.checkpoints.sources import parse_position, select_steps


@pytest.mark.parametrize(
    ("name", "step", "tokens"),
    [
        ("step143000", 143000, None),
        ("global_step100000", 100000, None),
        ("stage1-step1000-tokens5B", 1000, 5 * 10**9),
        ("stage2-ingredient1-step1000-tokens3B", 1000, 3 * 10**9),
        ("ckpt_000", 0, None),
        ("checkpoint-400", 400, None),
        ("step-001000-2BT", 1000, 2 * 10**9),
        ("multiberts-seed_0-step_20k", 20000, None),
        ("TinyLlama-1.1B-intermediate-step-1431k-3T", 1431000, 3 * 10**12),
        ("TinyLlama-1.1B-intermediate-step-240k-503b", 240000, 503 * 10**9),
        ("llama-step_1000-7B", 1000, None),
        ("step_1000_2B_tokens", 1000, 2 * 10**9),
        ("iter_1000_ckpt_3", 1000, None),
        ("epoch=0-step=100", 100, None),
        ("iter_0001000", 1000, None),
        ("step50000-tokens0.5T", 50000, 5 * 10**11),
        ("step_1.5k", 1500, None),
    ],
)
def test_every_published_naming_scheme(name, step, tokens):
    position = parse_position(name)
    assert (position.step, position.tokens) == (step, tokens)


@pytest.mark.parametrize(
    "name",
    [
        *("main", "v1.0", "pythia-70m", "stepwise", "footstep12x", "", "refs/pr/1", "1000"),
        *("checkpoint_1_300", "step-1,500", "step_2_000", "step1_5k", "checkpoint-100.5"),
        "checkpoint-2024-01-02",
    ],
)
def test_names_without_a_step(name):
    assert parse_position(name) is None


def test_the_series_is_the_name_without_step_and_tokens():
    def series(name):
        return parse_position(name).series

    assert series("stage1-step1000-tokens5B") == series("stage1-step2000-tokens9B")
    assert series("stage2-ingredient1-step1000-tokens3B") != series(
        "stage2-ingredient2-step1000-tokens3B"
    )
    assert series("epoch=0-step=100") == series("epoch=1-step=200")
    assert series("step1-epoch1") == series("step8-epoch2") == series("step9")
    assert series("ep0-step1") == series("ep1-step2")
    assert series("bestepoch3-step1") == series("bestepoch4-step2")


def test_selections():
    pythia = [0, *(2**k for k in range(10)), *range(1000, 144000, 1000)]
    assert select_steps(pythia, "all") == set(pythia)
    assert select_steps(pythia, "0,1, 512") == select_steps(pythia, [0, 1, 512]) == {0, 1, 512}
    assert select_steps(pythia, 512) == select_steps(pythia, "512") == {512}
    log = sorted(select_steps(pythia, "log"))
    assert log[:11] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert log[11:] == [1000, 2000, 4000, 8000, 16000, 33000, 66000, 131000, 143000]


def test_what_selects_no_steps_is_refused():
    with pytest.raises(ValueError, match='"all", "log"'):
        select_steps([0], "some")
