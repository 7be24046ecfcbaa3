"""What loggers get beside scalars; those of other packages are in tests/integrations."""

import logging
import re
import sys

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter

from embedgeo import GeometryMonitor, StepMonitor
from embedgeo.report import live
from embedgeo.report.runs import read_runs
from embedgeo.results.events import custom_layout, event_contents
from embedgeo.results.parquet import monitored_runs
from embedgeo.results.records import Records
from embedgeo.training.loggers import Illustrations, adapter_of
from tests.models import gpt_neox, token_batch
from tests.records import layer_records
from tests.training.loops import go_on
from tests.training.runs import fit, moments, steps

OPTIONS = {"every_n_steps": 2, "metrics": moments, "on_error": "raise"}


@pytest.fixture
def drawings(monkeypatch):
    """The numbers of records of which pictures are drawn: empty ones, four each time. A history
    that no other run began is not copied as a dict for each record.
    """
    drawn = []

    def draw(history, prefix):
        assert not isinstance(history, list)
        drawn.append(len(history))
        return [(f"{prefix}.{kind}/V", (b"PNG", 1, 1)) for kind in range(4)]

    monkeypatch.setattr(live, "draw_pictures", draw)
    return drawn


class Taker(SummaryWriter):
    """A writer that tells its pictures."""

    def images(self):
        """Steps of the pictures, by tag."""
        self.flush()
        events = event_contents(self.log_dir)
        return {tag: [each.step for each in events.Images(tag)] for tag in events.Tags()["images"]}


class TakingLogger(TensorBoardLogger):
    """Lightning's logger with such a writer."""

    def __init__(self, folder):
        super().__init__(folder)
        self.taker = Taker(str(folder))

    @property
    def experiment(self):
        return self.taker


def test_nothing_is_drawn_where_no_logger_takes_pictures(tmp_path, drawings):
    monitor = GeometryMonitor(**OPTIONS)
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path))
    model = gpt_neox()
    with StepMonitor(model, log=lambda step, scalars: None, **OPTIONS) as stepped, stepped.step(0):
        model(**token_batch(2))
    assert monitor.history
    assert stepped.history
    assert not drawings


def test_a_logger_that_fails_leaves_the_others_and_the_monitor_at_work(tmp_path, drawings):
    broken = TakingLogger(tmp_path / "broken")
    broken.taker.log_dir = None  # where charts of others are looked for
    taker = TakingLogger(tmp_path / "taker")
    monitor = GeometryMonitor(every_n_steps=1, metrics=moments)
    with pytest.warns(
        UserWarning,
        match=r"tensorboard gets no more charts and pictures of .*TypeError",
    ) as found:
        fit(tmp_path, monitor, max_steps=3, logger=[CSVLogger(tmp_path), broken, taker])
    assert len([each for each in found if "no more charts" in str(each.message)]) == 1
    assert all({0, 3} <= {*drawn_at} for drawn_at in taker.experiment.images().values())
    assert steps(monitor) == [0, 1, 2, 3]
    broken_alone, history = Illustrations("geometry", on_error="raise"), Records(layer_records(0))
    with pytest.raises(TypeError):
        broken_alone.write([broken.experiment], history)


def test_lightnings_loggers_write_on_rank_zero_alone(tmp_path, monkeypatch, drawings):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    model = gpt_neox()
    for log in (CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")):
        with StepMonitor(model, log=log, **OPTIONS) as monitor, monitor.step(0):
            model(**token_batch(2))
        assert monitor.history
    assert not drawings
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and path.name != "history.parquet"
    ]


def test_without_what_draws_them_there_are_no_pictures_and_one_line_says_so(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    taker, illustrations, history = Taker(str(tmp_path)), Illustrations("geometry"), []
    for step in range(3):
        history += layer_records(step)
        illustrations.write([taker], history)
    (line,) = caplog.messages
    assert "matplotlib, which is not installed" in line
    assert "pip install 'embedgeo[report]'" in line
    assert not taker.images()


def test_charts_of_what_is_logged_later_are_added_and_the_users_are_kept(tmp_path):
    logger, history = TensorBoardLogger(tmp_path, prefix="lr=1"), []
    logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})
    monitors = [Illustrations(prefix, pictures=False) for prefix in ("one", "two")]
    for metric in "VM":
        history += layer_records(0, metrics=metric)
        for illustrations in monitors:
            illustrations.write([logger], history)
    logger.experiment.close()  # as Lightning does after a fit
    adapter_of(logger, "one").write_image("V", (b"PNG", 1, 1), 2)
    logger.experiment.close()
    events = event_contents(logger.log_dir)
    assert events.Tags()["images"] == ["V"]
    two, one, mine = custom_layout(events).category
    assert [each.title for each in (two, mine)] == ["two: size and variance", "mine"]
    for metric in "VM":
        tag = f"lr=1-one.{metric}/mean"
        assert any(re.match(chart.multiline.tag[0], tag) for chart in one.chart)


def test_pictures_of_a_run_that_goes_on_begin_where_it_began(tmp_path, monkeypatch):
    drawn = []

    def draw(history, prefix):
        drawn.append(sorted({each["step"] for each in history}))
        return ()

    monkeypatch.setattr(live, "draw_pictures", draw)
    model, states = gpt_neox(), [None]
    for numbers in (range(3), range(3, 6)):
        options = {"metrics": moments, "on_error": "raise", "measure_last": False}
        with SummaryWriter(str(tmp_path)) as log:
            monitor = StepMonitor(model, 1, log=log, **options)
            if states[-1]:
                monitor.load_state_dict(states[-1])
            go_on(monitor, numbers, lambda: model(**token_batch()))
            monitor.close()
            states.append(monitor.state_dict())
    assert drawn[-1] == [0, 1, 2, 3, 4, 5]
    assert drawn[3] == [0, 1, 2, 3]


def test_what_a_model_computes_in_and_how_many_ranks_there_are_is_on_record(tmp_path):
    model = gpt_neox()
    options = {"folder": tmp_path, "metrics": moments, "measure_last": False}
    cast = torch.autocast("cpu", torch.bfloat16)
    with StepMonitor(model, **options) as monitor, monitor.step(0), cast:
        model(**token_batch())
    (run,) = read_runs([tmp_path])
    assert run.settings["dtype"] == "float32 (bfloat16 autocast)"
    (monitored,) = monitored_runs(tmp_path)
    assert monitored.origin["ranks"] == "1"
